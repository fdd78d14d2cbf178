"""The floors of the GPU benchmark, against numbers worked out by hand."""

from __future__ import annotations

import pytest
from draftline.benchmarks.gpu.floors import (
    DeviceRates,
    HeadShape,
    StageShape,
    StepTraffic,
    attention_work,
    copy_work,
    product_work,
    sampling_work,
    step_work,
)
from draftline.benchmarks.gpu.plan import FULL_PLAN, TINY_PLAN, GpuModelPlan, StepCase
from transformers import AutoModelForCausalLM

# Two query heads share a key; a key and a value of 4 numbers of 2 bytes are 16 bytes a head.
HEADS = HeadShape(num_heads=4, num_kv_heads=2, head_dim=4)
SHAPE = StageShape(
    num_layers=3, hidden_size=8, intermediate_size=10, heads=HEADS, vocab_size=50
)  # fmt: skip
# Query and output 8 x 16 each, key and value 8 x 8 each, three of 8 x 10; the head 50 x 8.
LAYER = 2 * 8 * 16 + 2 * 8 * 8 + 3 * 8 * 10
MATRICES = 3 * LAYER + 400


def test_what_is_fixed() -> None:
    assert LAYER == 624
    assert SHAPE.matrix_params == MATRICES == 2272
    # Two norms a layer and the last one, 8 numbers each.
    assert SHAPE.read_params == 2272 + 7 * 8
    assert HEADS.kv_bytes == 32
    assert SHAPE.kv_bytes == 96


def test_a_step() -> None:
    """Five requests of three rows behind 20 tokens."""
    work = step_work(SHAPE, batch=5, rows_each=3, context_len=20)
    weights = 2 * (2272 + 56)
    embedded = 15 * 8 * 2
    cached = 5 * 20 * 96
    written = 15 * 96
    assert work.num_bytes == weights + embedded + cached + written
    # Each row and query head: 4 products of a key and 4 of a value for each of 20 tokens.
    attended = 15 * 3 * 4 * 20 * 2 * (4 + 4)
    assert work.flops == 2 * 15 * 2272 + attended


def test_a_stage_in_the_middle() -> None:
    middle = StageShape(
        num_layers=3, hidden_size=8, intermediate_size=10, heads=HEADS, vocab_size=50,
        has_embed=False, has_head=False,
    )  # fmt: skip
    assert middle.matrix_params == 3 * LAYER
    assert middle.read_params == 3 * LAYER + 6 * 8
    # One row: hidden states come in and go out.
    work = step_work(middle, batch=1, rows_each=1, context_len=0)
    assert work == StepTraffic(2 * (1872 + 48) + 2 * 16 + 96, 2 * 1872)


def test_attention_of_one_layer() -> None:
    work = attention_work(HEADS, batch=2, rows_each=3, context_len=10)
    lines = 6 * 4 * 4 * 2
    assert work.num_bytes == 2 * lines + (2 * 10 + 6) * 32
    assert work.flops == 6 * 4 * 10 * 2 * (4 + 4)


def test_the_others() -> None:
    assert sampling_work(64, 128_000) == StepTraffic(32_768_000, 0)
    assert copy_work(100) == StepTraffic(200, 0)
    assert product_work(10) == StepTraffic(600, 2000)
    assert product_work(10).intensity == pytest.approx(10 / 3)


def test_the_floor_is_the_longer_of_both() -> None:
    rates = DeviceRates(num_bytes=100, flops=1000)
    assert rates.floor_s(StepTraffic(500, 1000)) == 5
    assert rates.bound(StepTraffic(500, 1000)) == "bytes"
    assert rates.floor_s(StepTraffic(100, 9000)) == 9
    assert rates.bound(StepTraffic(100, 9000)) == "flops"


def test_the_8b_shape_is_that_model() -> None:
    """Its parameters are known, and so is that a token of it takes 128 KiB of cache."""
    shape = FULL_PLAN.whole.shape()
    embedding = 128256 * 4096
    assert shape.read_params + embedding == 8_030_261_248
    assert shape.kv_bytes == 128 * 1024
    # At batch 1 on 4.3 TB/s: 15.0 GB of weights and 0.13 GB of cache in 3.5 ms.
    work = step_work(shape, 1, 1, 1024)
    floor = DeviceRates(num_bytes=4.3e12, flops=790e12).floor_s(work)
    assert floor == pytest.approx(3.52e-3, rel=0.01)


@pytest.mark.parametrize("plan", [TINY_PLAN.whole, TINY_PLAN.part])
def test_shapes_count_the_parameters_of_the_model(plan: GpuModelPlan) -> None:
    model = AutoModelForCausalLM.from_config(plan.config())
    read = [*model.model.layers[plan.span.first : plan.span.last].parameters()]
    if plan.span.is_last:
        read += [*model.model.norm.parameters(), *model.lm_head.parameters()]
    assert sum(parameter.numel() for parameter in read) == plan.shape().read_params


def test_cases_of_goals_come_with_their_models() -> None:
    for plan in (FULL_PLAN, TINY_PLAN):
        assert {plan.one_token, plan.tree} <= set(plan.whole.cases)
        assert plan.attention_goal in plan.attention
    assert len(set(FULL_PLAN.whole.cases)) == 4 * 6 * 3
    assert FULL_PLAN.whole.cases[0] == FULL_PLAN.one_token
    assert FULL_PLAN.whole.cases[-1] == StepCase(64, 128, 32768)
    assert StepCase(4, 64, 8192).name == "batch 4, 64 nodes, context 8k"
    # 8,257 rows and tokens in blocks of 16.
    assert StepCase(4, 64, 8192).num_slots(16) == 4 * 8272
