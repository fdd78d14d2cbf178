"""Choosing tokens alone, as the last stage does it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from ...core.types import SamplingRows
from ...models.sampler import choose_tokens
from .findings import Findings
from .floors import sampling_work
from .setting import Setting

GROUP = "sampling"
KINDS: dict[str, dict[str, float]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 0.8, "top_k": 50},
    "top_p": {"temperature": 0.8, "top_p": 0.95},
    "top_k, top_p, min_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
}
# Of logits, as those of trained models.
SPREAD = 3.0


def measure_sampling(setting: Setting, findings: Findings) -> None:
    """Every kind on all rows at once; the wait for the tokens is in the wall time only."""
    plan = setting.plan
    rows, vocab_size = plan.sampling_rows, plan.sampling_vocab
    logits = torch.randn(rows, vocab_size, device=setting.device) * SPREAD
    work = sampling_work(rows, vocab_size, logits.itemsize)
    for name in KINDS:
        sampling = sampling_rows(rows, name)

        def choose(sampling: SamplingRows = sampling) -> torch.Tensor:
            return choose_tokens(logits, sampling)

        started = time.perf_counter()
        choose()
        setting.clock.wait()
        findings.facts.setdefault("first_sampling_s", {})[name] = time.perf_counter() - started
        wall = setting.clock.waited(lambda choose=choose: choose().cpu())
        times = setting.clock.on_device(choose)
        findings.add(GROUP, figure_name(rows, vocab_size, name), times, work, wall)


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
