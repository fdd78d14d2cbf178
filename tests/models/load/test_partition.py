from itertools import combinations

import pytest
from draftline.core.errors import ConfigError
from draftline.models.load.partition import LayerSpan, partition, partition_layers
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig


def slowest(spans: list[LayerSpan], costs: list[float], first: float, last: float) -> float:
    sums = [sum(costs[span.first : span.last]) for span in spans]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 8),
    st.integers(0, 60), st.integers(0, 60),
)  # fmt: skip
def test_no_other_split_has_a_faster_slowest_stage(
    costs: list[float], num_stages: int, first: int, last: int
) -> None:
    num_stages = min(num_stages, len(costs))
    spans = partition(costs, num_stages, first, last)
    assert len(spans) == num_stages
    assert [layer for span in spans for layer in range(span.first, span.last)] == [
        *range(len(costs))
    ]
    every_split = (
        [LayerSpan(a, b, len(costs)) for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True)]
        for cuts in combinations(range(1, len(costs)), num_stages - 1)
    )
    fastest = min(slowest(split, costs, first, last) for split in every_split)
    assert slowest(spans, costs, first, last) == fastest


def test_equal_layers_are_split_evenly() -> None:
    bounds = [(span.first, span.last) for span in partition([1.0] * 8, 3)]
    assert sorted(last - first for first, last in bounds) == [2, 3, 3]


def test_a_large_head_takes_layers_from_the_last_stage() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
        vocab_size=3000,
    )  # fmt: skip
    spans = partition_layers(config, 2)
    assert spans[1].last - spans[1].first < spans[0].last - spans[0].first
    assert [span.is_first for span in spans] == [True, False]
    assert [span.is_last for span in spans] == [False, True]


@pytest.mark.parametrize("num_stages", [-1, 0, 5])
def test_a_wrong_number_of_stages_names_the_setting(num_stages: int) -> None:
    with pytest.raises(ConfigError, match="pipeline_parallel_size: must be from 1 to 4"):
        partition([1.0] * 4, num_stages)


def test_a_span_outside_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="span"):
        LayerSpan(3, 3, 4)
