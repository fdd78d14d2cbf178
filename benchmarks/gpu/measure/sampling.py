"""Choosing tokens alone, as the last stage does it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....core.steps import SamplingRows
from ....kernels.sampling.reference import TorchSampler
from ....kernels.sampling.sampler import Sampler, choose_sampler
from ..findings import Findings
from ..floors import sampling_work
from ..setting import GpuSetting

GROUP = "sampling"
TORCH_GROUP = "sampling by torch"
KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k, top_p, min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
}
# Of logits, as those of trained models.
SPREAD = 3.0


def measure_sampling(setting: GpuSetting, findings: Findings) -> None:
    """Every kind on all rows at once, as a stage does it; by torch too where that is another way.

    The wait for the tokens is in the wall time only.
    """
    rows, vocab_size = setting.plan.sampling_rows, setting.plan.sampling_vocab
    logits = torch.randn(rows, vocab_size, device=setting.device) * SPREAD
    sampler, torch_sampler = choose_sampler(setting.device), TorchSampler()
    findings.note("sampling", type(sampler).__name__)

    def measure(kind: str) -> None:
        _measure(GROUP, sampler, kind, logits, setting=setting, findings=findings)
        if isinstance(sampler, TorchSampler):
            return
        _measure(TORCH_GROUP, torch_sampler, kind, logits, setting=setting, findings=findings)
        sampling = sampling_rows(rows, kind)
        wanted = torch_sampler.choose(logits, sampling)
        differing = int((sampler.choose(logits, sampling) != wanted).sum())
        if differing:
            findings.fail(f"{GROUP}, {kind}", f"{differing} tokens differ from torch's")

    for kind in KINDS:
        findings.attempt(f"{GROUP}, {kind}", partial(measure, kind))


def _measure(
    group: str, sampler: Sampler, kind: str, logits: Tensor,
    *, setting: GpuSetting, findings: Findings,
) -> None:  # fmt: skip
    rows, vocab_size = logits.shape
    sampling = sampling_rows(rows, kind)
    wall = setting.clock.waited(lambda: sampler.choose(logits, sampling).cpu())
    times = setting.clock.on_device(lambda: sampler.choose(logits, sampling))
    work = sampling_work(rows, vocab_size, logits.itemsize)
    findings.add(group, figure_name(rows, vocab_size, kind), times, work, wall=wall)


def figure_name(rows: int, vocab_size: int, kind: str) -> str:
    """What the figure of a kind is called."""
    return f"{rows} x {vocab_size // 1000}k, {kind}"


def sampling_rows(rows: int, kind: str) -> SamplingRows:
    """Rows that all sample by one of `KINDS`, each with a seed of its own."""
    options: dict[str, Any] = KINDS[kind]

    def column(name: str, default: float, dtype: type = np.float32) -> Any:
        return np.full(rows, options.get(name, default), dtype=dtype)

    return SamplingRows(
        temperature=column("temperature", 0.0),
        top_k=column("top_k", 0, np.int32),
        top_p=column("top_p", 1.0),
        min_p=column("min_p", 0.0),
        typical_p=column("typical_p", 1.0),
        seed=np.arange(rows, dtype=np.int64),
        position=np.arange(rows, dtype=np.int64) + 100,
    )
