"""What the device does at best: the floors are made of it."""

from __future__ import annotations

import statistics

import torch

from .findings import Findings
from .floors import Rates, copy_work, product_work
from .setting import DTYPE, Setting


def measure_rates(setting: Setting, findings: Findings) -> None:
    """Sets `findings.rates`: bytes of a large copy, operations of a large bfloat16 product."""
    device, plan = setting.device, setting.plan
    source = torch.randint(256, (plan.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = setting.clock.on_device(lambda: target.copy_(source))
    del source, target
    left, right = (
        torch.randn(plan.product_size, plan.product_size, dtype=DTYPE, device=device)
        for _ in range(2)
    )
    out = torch.empty_like(left)
    product = setting.clock.on_device(lambda: torch.mm(left, right, out=out))
    copied = copy_work(plan.copy_bytes)
    multiplied = product_work(plan.product_size, DTYPE.itemsize)
    findings.rates = Rates(
        num_bytes=copied.num_bytes / statistics.median(copying),
        flops=multiplied.flops / statistics.median(product),
    )
    findings.add("rates", f"copy of {_size(plan.copy_bytes)}", copying, copied)
    size = plan.product_size
    findings.add("rates", f"product {size} x {size}", product, multiplied)


def _size(num_bytes: int) -> str:
    power, unit = (30, "GiB") if num_bytes >= 1 << 30 else (20, "MiB")
    return f"{num_bytes >> power} {unit}"
