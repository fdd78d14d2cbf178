"""What the device does at best: the floors are made of it."""

from __future__ import annotations

import statistics

import torch

from ..findings import Findings
from ..floors import DeviceRates, StepTraffic, copy_work, product_work
from ..setting import DTYPE, GpuSetting


def measure_rates(setting: GpuSetting, findings: Findings) -> None:
    """Sets `findings.rates`: bytes of a large copy or of reading alone, whichever are more, and
    operations of a large bfloat16 product.
    """
    plan = setting.plan
    copying, reading, product = _copy(setting), _read(setting), _product(setting)
    copied, read = copy_work(plan.copy_bytes), StepTraffic(plan.copy_bytes, 0)
    multiplied = product_work(plan.product_size, DTYPE.itemsize)
    findings.rates = DeviceRates(
        num_bytes=max(
            copied.num_bytes / statistics.median(copying),
            read.num_bytes / statistics.median(reading),
        ),
        flops=multiplied.flops / statistics.median(product),
    )
    findings.add("rates", f"copy of {_size(plan.copy_bytes)}", copying, copied)
    findings.add("rates", f"read of {_size(plan.copy_bytes)}", reading, read)
    size = plan.product_size
    findings.add("rates", f"product {size} x {size}", product, multiplied)


def _copy(setting: GpuSetting) -> list[float]:
    size = (setting.plan.copy_bytes,)
    source = torch.randint(256, size, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return setting.clock.on_device(lambda: target.copy_(source))


def _read(setting: GpuSetting) -> list[float]:
    """The sum of all numbers: what steps of few rows do to weights, read and hardly write."""
    source = torch.ones(setting.plan.copy_bytes // 4, device=setting.device)
    return setting.clock.on_device(source.sum)


def _product(setting: GpuSetting) -> list[float]:
    size = (setting.plan.product_size, setting.plan.product_size)
    left, right = (torch.randn(size, dtype=DTYPE, device=setting.device) for _ in range(2))
    out = torch.empty_like(left)
    return setting.clock.on_device(lambda: torch.mm(left, right, out=out))


def _size(num_bytes: int) -> str:
    power, unit = (30, "GiB") if num_bytes >= 1 << 30 else (20, "MiB")
    return f"{num_bytes >> power} {unit}"
