"""Data parallelism: the processes of a run learn the same as one process with all their texts.

Each process has some of a step's texts, and gradients are averaged. Texts differ in length, so a
mean over rows is the process's own sum divided by the average number of rows a process. Random
numbers of a text depend on the run's seed and the text's place in the run, not on the process.
"""

from __future__ import annotations

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor


def mean_count(count: int) -> float:
    """The mean of a count over all processes; a collective call."""
    return mean_value(float(count))


def mean_value(value: float) -> float:
    """As `mean_count`, of any number."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    own = torch.tensor(value, dtype=torch.float64, device=PartialState().device)
    mean = reduce(own, reduction="mean")
    assert isinstance(mean, Tensor)
    return mean.item()


def share_of_rows(values: Tensor, count: float) -> Tensor:
    """This process's part of a mean over all processes' rows; 0 without any row.

    values  [rows]
    count   `mean_count` of the rows
    """
    return values.sum() / (count or 1.0)


def text_generator(seed: int, place: int) -> torch.Generator:
    """The random generator of the text at a place of the run, counted over steps and processes."""
    [state] = np.random.SeedSequence((seed, place)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state))
