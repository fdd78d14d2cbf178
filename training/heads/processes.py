"""What the processes of a run share, so that they learn what one would from all their texts.

Each has some of a step's texts, and the mean of their gradients is taken. A mean over rows is
therefore a sum of a process's own divided by the rows that a process has on average, not by its
own: texts differ in length. What is drawn for a text follows from the run's seed and the text's
place in it, whoever has it.
"""

from __future__ import annotations

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor


def mean_count(count: int) -> float:
    """The mean of a count over all processes, each of which must ask."""
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
    """The part of a mean over all processes' rows that is a process's own; 0 without any row.

    values  [rows]
    count   `mean_count` of the rows
    """
    return values.sum() / (count or 1.0)


def text_generator(seed: int, place: int) -> torch.Generator:
    """What is drawn for the text at a place of the run, counted over steps and processes."""
    [state] = np.random.SeedSequence((seed, place)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state))
