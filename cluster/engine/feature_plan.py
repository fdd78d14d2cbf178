"""What stages hand on for trained heads, and the heads that the last stage loads.

States of layers, or for a head whose first matrix reads several layers side by side one running
sum of what it makes of them (`FeatureSum`): fewer columns between stages, for products that every
row of a step takes and not those alone that a head reads in the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

from ...models.load.model_info import ModelInfo
from ...models.load.partition import LayerSpan
from ...models.stage.options import FeatureSum
from ..config import HEAD, EngineConfig
from ..drafting.head_features import (
    feature_layers_of,
    head_folder,
    is_in_last_stage,
    last_stage_heads,
)

if TYPE_CHECKING:
    from ...drafters.heads.last_stage import LastStageHeadSpec


class FeaturePlan(NamedTuple):
    """What all stages note, as `StageOptions` has it, and the heads of the last one."""

    layers: tuple[int, ...]
    sums: tuple[FeatureSum, ...]
    heads: tuple[LastStageHeadSpec, ...]


def plan_features(
    config: EngineConfig, target: ModelInfo, spans: Sequence[LayerSpan], device: str
) -> FeaturePlan:
    """For stages of these spans on a device.

    Raises `CheckpointError`; `ConfigError` that names the drafter and the key.
    """
    layers = feature_layers_of(config, target)
    sums = _sums_of(config, target) if _may_sum(config, len(spans), device) else {}
    if sums:
        rest = feature_layers_of(config, target, without=sums)
        if _handed_on(rest, list(sums.values()), spans, target) < _handed_on(
            layers, (), spans, target
        ):
            return _with_sums(config, target, rest, sums)
    return FeaturePlan(layers, (), last_stage_heads(config, target, layers))


def _with_sums(
    config: EngineConfig, target: ModelInfo, layers: tuple[int, ...], sums: dict[str, FeatureSum]
) -> FeaturePlan:
    # Behind the states of layers.
    ends = accumulate((one.size for one in sums.values()), initial=len(layers) * target.hidden_size)
    columns = dict(zip(sums, pairwise(ends), strict=True))
    heads = last_stage_heads(config, target, layers, columns)
    return FeaturePlan(layers, tuple(sums.values()), heads)


def _may_sum(config: EngineConfig, num_stages: int, device: str) -> bool:
    """Whether sums are wanted, if they are narrower. Heads that states are sent to read states."""
    if num_stages == 1 or config.head_features == "states":
        return False
    # Between threads nothing is sent, and a CPU feels each product.
    if config.head_features == "auto" and (config.backend == "local" or device == "cpu"):
        return False
    return all(is_in_last_stage(drafter) for drafter in config.drafters if drafter.kind == HEAD)


def _sums_of(config: EngineConfig, target: ModelInfo) -> dict[str, FeatureSum]:
    """By name of the head, of those whose first matrix can be cut by layers."""
    found = {}
    for drafter in config.drafters:
        if drafter.kind != HEAD:
            continue
        # As other drafters' code that needs torch.
        from ...drafters.heads.drafter import feature_layers  # noqa: PLC0415
        from ...models.heads.layer_projection import sum_size  # noqa: PLC0415

        folder = head_folder(drafter)
        layers, size = feature_layers(folder, target), sum_size(folder)
        if size and len(set(layers)) == len(layers):
            found[drafter.source] = FeatureSum(folder, layers, size)
    return found


def _handed_on(
    layers: Sequence[int], sums: Sequence[FeatureSum], spans: Sequence[LayerSpan], target: ModelInfo
) -> int:
    """Columns of a row that all stages together hand on."""
    # As in `_sums_of`.
    from ...models.stage.feature_taps import carried_sizes  # noqa: PLC0415

    return sum(
        sum(carried_sizes(layers, sums, span.last, span.num_layers, target.hidden_size))
        for span in spans[:-1]
    )
