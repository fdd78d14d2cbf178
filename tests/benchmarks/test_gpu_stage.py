"""The GPU benchmark's steps and stages, and the parts of the engine that it looks for, on a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from draftline.benchmarks.gpu.findings import Findings
from draftline.benchmarks.gpu.floors import DeviceRates
from draftline.benchmarks.gpu.instruments.clock import Clock, Repeats, TimeBudget
from draftline.benchmarks.gpu.instruments.stages import (
    decode_step,
    random_slice,
    random_stage,
    tree_mask,
)
from draftline.benchmarks.gpu.measure import products as measure_products
from draftline.benchmarks.gpu.measure import sampling as measure_sampling
from draftline.benchmarks.gpu.measure.attention import relative_error
from draftline.benchmarks.gpu.measure.sampling import KINDS, sampling_rows
from draftline.benchmarks.gpu.measure.states import measure_states
from draftline.benchmarks.gpu.plan import TINY_PLAN, StepCase
from draftline.benchmarks.gpu.report import goals
from draftline.benchmarks.gpu.setting import GpuSetting
from draftline.core.steps import SamplingRows, StepOutput
from draftline.core.tree.tree import unpack
from draftline.models.stage import gpu_path

CPU = torch.device("cpu")
ONCE = Repeats(warm=0, least=1, most=1, seconds=0.0)


def test_a_tree_of_three() -> None:
    """The root's children are 1 and 2; 3 is a child of 1."""
    wanted = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]
    assert tree_mask(3).astype(int).tolist() == wanted


def test_requests_of_a_step_share_no_slot() -> None:
    case = StepCase(batch=3, nodes=3, context_len=9)
    step = decode_step(case, num_blocks=12, block_size=4, vocab_size=50)
    # 13 tokens are four blocks.
    assert sorted(step.block_tables.ravel()) == list(range(12))
    assert step.request_starts.tolist() == [0, 4, 8, 12]
    assert step.positions[:4].tolist() == [9, 10, 10, 11]
    for index, tree in enumerate(step.trees):
        assert tree is not None
        table = step.block_tables[index]
        # Places 9 to 12 of the request: three in its third block, one in its last.
        first = table[2] * 4
        assert tree.slots.tolist() == [first + 1, first + 2, first + 3, table[3] * 4]
        assert step.slots[4 * index : 4 * index + 4].tolist() == tree.slots.tolist()
        assert (unpack(tree.ancestors, 4) == tree_mask(3)).all()


def test_stages_of_random_weights_follow_one_another() -> None:
    """The middle one takes and gives hidden states; the whole one answers every row."""
    case = StepCase(batch=2, nodes=2, context_len=5)
    for plan in (TINY_PLAN.whole, TINY_PLAN.part):
        part = random_slice(plan.config(), plan.span, torch.bfloat16, CPU, fused=False)
        stage, attention = random_stage(part, 8, 4, "auto", (case,))
        assert attention == "sdpa (no GPU)"
        assert stage.kv.data.float().std() == pytest.approx(1, rel=0.05)
        step = decode_step(case, 8, 4, plan.config().vocab_size)
        if stage.is_first:
            answer = stage.run(step)
            assert isinstance(answer, StepOutput)
            assert len(answer.target_tokens) == 6
        else:
            hidden = stage.run(step, torch.randn(6, 64, dtype=torch.bfloat16))
            assert isinstance(hidden, torch.Tensor)
            assert hidden.shape == (6, 64)
            assert torch.isfinite(hidden).all()


def test_a_hybrid_stage_is_measured() -> None:
    setting = GpuSetting(TINY_PLAN, Clock(CPU, ONCE), TimeBudget(0), "auto", 16)
    findings = Findings(rates=DeviceRates(1.0, 1.0))
    measure_states(setting, findings)
    assert findings.failed == {}
    name = TINY_PLAN.hybrid.name
    groups = {figure.group for figure in findings.figures}
    # On a CPU there are no graphs.
    assert groups == {"states of a layer", f"{name}, without graphs"}
    assert "need a GPU" in findings.facts[f"graphs of {name}"]


def test_rows_of_a_kind() -> None:
    rows = sampling_rows(3, "top_k")
    assert rows.top_k.tolist() == [50] * 3
    assert rows.top_k.dtype == np.int32
    assert rows.temperature.tolist() == pytest.approx([0.8] * 3)
    assert (rows.top_p == 1).all()
    assert sampling_rows(3, "greedy").temperature.tolist() == [0.0] * 3


def test_a_wrong_result_is_no_small_error() -> None:
    wanted = torch.tensor([1.0, -4.0])
    assert relative_error(torch.tensor([1.0, -3.0]), wanted) == 0.25
    assert not relative_error(torch.tensor([1.0, torch.nan]), wanted) < 1


@pytest.mark.parametrize(
    ("runs", "attention", "is_fused"),
    [(True, "auto", True), (True, "sdpa", False), (False, "auto", False)],
)
def test_modules_are_fused_where_triton_runs(
    monkeypatch: pytest.MonkeyPatch, runs: bool, attention: str, is_fused: bool
) -> None:
    monkeypatch.setattr(gpu_path, "runs_triton", lambda _: runs)
    assert gpu_path.uses_fused_modules(CPU, attention) == is_fused


def test_a_sampler_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_sampling, "choose_sampler", lambda _: Chooser())
    setting = GpuSetting(TINY_PLAN, Clock(CPU, ONCE), TimeBudget(0), "auto", 16)
    findings = Findings(rates=DeviceRates(1.0, 1.0))
    measure_sampling.measure_sampling(setting, findings)
    groups = {figure.group for figure in findings.figures}
    assert groups == {"sampling", "sampling by torch"}
    assert {what for names in findings.failed.values() for what in names} == {
        f"sampling, {kind}" for kind in KINDS
    }


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (
            "load_quantized_linear",
            lambda _: lambda x, weight, *_, **__: 2 * x @ weight.dequantized(x.dtype).T,
        ),
        ("load_invariant_linear", lambda _: lambda x, weight: (x + 1) @ weight),
    ],
)
def test_a_product_that_is_wrong_is_told(
    name: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_products, name, wrong)
    findings = Findings(rates=DeviceRates(1.0, 1.0))
    setting = GpuSetting(TINY_PLAN, Clock(CPU, ONCE), TimeBudget(0), "auto", 16)
    measure_products.measure_products(setting, findings)
    assert {what for names in findings.failed.values() for what in names} == {
        f"{measure_products.GROUP}, {rows} rows" for rows in measure_products.ROWS
    }
    kinds = {figure.name.rpartition(", ")[2]: figure.work for figure in findings.figures}
    sizes = {kind: work.num_bytes / kinds["bfloat16"].num_bytes for kind, work in kinds.items()}
    # Scales weigh more here than in a layer of any use.
    assert 0.5 < sizes["int8"] <= sizes["fp8"] < 0.55
    assert 0.25 < sizes["4 bits"] < 0.35


def test_a_kind_that_cannot_be_sampled_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_sampling, "choose_sampler", lambda _: Refuser())
    setting = GpuSetting(TINY_PLAN, Clock(CPU, ONCE), TimeBudget(0), "auto", 16)
    findings = Findings(rates=DeviceRates(1.0, 1.0))
    measure_sampling.measure_sampling(setting, findings)
    sampled = {figure.name for figure in findings.figures if figure.group == "sampling"}
    assert len(sampled) == len(KINDS) - 1
    assert findings.failed["RuntimeError: no top_k"] == ["sampling, top_k"]
    verification_result = {
        goal.what: goal.verification_result for goal in goals(TINY_PLAN, findings)
    }
    assert verification_result["sampling 4 x 1k, slowest kind"] == "not measured"


class Chooser:
    """Always takes the first token."""

    def choose(self, logits: torch.Tensor, _sampling: object) -> torch.Tensor:
        return torch.zeros(len(logits), dtype=torch.int32)


class Refuser(Chooser):
    """The same, but not with top_k alone."""

    def choose(self, logits: torch.Tensor, sampling: SamplingRows) -> torch.Tensor:
        if sampling.top_k[0] and sampling.top_p[0] == 1:
            raise RuntimeError("no top_k")
        return super().choose(logits, sampling)
