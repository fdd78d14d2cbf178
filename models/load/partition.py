"""How a model's layers are split over pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from transformers import PretrainedConfig

from ...core.errors import ConfigError
from .checkpoint import read_config, resolve_model_path
from .model_info import head_dim, num_kv_heads
from .supported import check_supported, layer_sizes, naming, runs_by_layers


@dataclass(frozen=True, slots=True)
class LayerSpan:
    """The layers that one stage holds: `first` inclusive, `last` exclusive, of `num_layers`."""

    first: int
    last: int
    num_layers: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last <= self.num_layers:
            raise ConfigError(
                "span",
                f"layers {self.first}..{self.last} are not a span of {self.num_layers} layers",
            )

    @property
    def is_first(self) -> bool:
        """Whether the stage embeds tokens."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage turns hidden states into tokens."""
        return self.last == self.num_layers


def partition_layers(config: PretrainedConfig | str | Path, num_stages: int) -> list[LayerSpan]:
    """Split a model (its config or its checkpoint folder) into `num_stages` contiguous spans.

    Cost is counted in weights read for one decoded token: a layer's matrices, one row of the
    embedding, the whole head. Of experts all count: a tree's tokens wake many. Raises `ConfigError`
    (`pipeline_parallel_size`), and of a folder `CheckpointError` unless stages run such models.
    """
    if not isinstance(config, PretrainedConfig):
        folder = resolve_model_path(config)
        config = read_config(folder)
        check_supported(config, folder)
        with naming(folder, config):
            return partition_layers(config, num_stages)
    head = config.vocab_size * config.hidden_size
    if runs_by_layers(config):
        num_heads = config.num_attention_heads + num_kv_heads(config)
        attention = 2 * config.hidden_size * head_dim(config) * num_heads
        layer = attention + 3 * config.hidden_size * config.intermediate_size
        costs = [float(layer)] * config.num_hidden_layers
    else:
        costs = list(map(float, layer_sizes(config)))
    return partition(costs, num_stages, first_cost=config.hidden_size, last_cost=head)


def partition(
    costs: Sequence[float], num_stages: int, first_cost: float = 0.0, last_cost: float = 0.0
) -> list[LayerSpan]:
    """The split of layers with these costs whose slowest stage is fastest.

    `first_cost` and `last_cost` fall on the first and the last stage (embedding and head). Among
    equally fast splits the most even one is taken. Every stage gets at least one layer.
    Raises `ConfigError` (`pipeline_parallel_size`) for fewer than 1 or more stages than layers.
    """
    num_layers = len(costs)
    if not 1 <= num_stages <= num_layers:
        raise ConfigError(
            "pipeline_parallel_size",
            f"must be from 1 to {num_layers}, the number of the model's layers, not {num_stages}",
        )
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def stage_cost(first: int, last: int) -> float:
        extra = (first_cost if first == 0 else 0.0) + (last_cost if last == num_layers else 0.0)
        return prefix[last] - prefix[first] + extra

    # best[last] = (slowest stage, sum of squares, boundaries) over splits of the first `last`
    # layers; tuples compare in that order, which is the order of preference.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for _ in range(num_stages):
        longer: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for first, (slowest, squares, bounds) in best.items():
            for last in range(first + 1, num_layers + 1):
                cost = stage_cost(first, last)
                split = (max(slowest, cost), squares + cost * cost, (*bounds, last))
                longer[last] = min(longer.get(last, split), split)
        best = longer
    return [LayerSpan(first, last, num_layers) for first, last in pairwise(best[num_layers][2])]
