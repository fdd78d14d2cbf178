"""A stage that replays recorded graphs answers as one that runs eagerly."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.steps import HeadInput, LogProbInput, ProbeInput, StepInput, StepOutput
from draftline.models.attention.backend import choose_backend
from draftline.models.layers.model_slice import load_slice
from draftline.models.load.partition import LayerSpan
from draftline.models.stage import gpu_path
from draftline.models.stage.gpu_path import (
    CudaCapture,
    GraphOptions,
    GraphPath,
    GraphReport,
    rows_of_graphs,
)
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from draftline.models.stage.plain_path import PlainPath, make_kv
from draftline.models.stage.stage import Stage
from support.fakes.recorded_graph import RecordedGraphs
from support.inputs.random_steps import BLOCK_SIZE, NUM_BLOCKS, random_steps
from support.inputs.steps import PagedRequest, make_step
from support.tools.graph_paths import use_graphs
from support.tools.tiny_models import save_tiny_model
from torch.utils._pytree import tree_leaves

# The kernels are interpreted, so that every layer takes its time.
NUM_LAYERS = 2
WHOLE = LayerSpan(0, NUM_LAYERS, NUM_LAYERS)
BOUND = 1e-4
OPTIONS = GraphOptions(max_rows=12, max_requests=3, max_positions=64)
on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="records the interpreter's kernels")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> RecordedGraphs:
    return RecordedGraphs(monkeypatch)


def captured(stage: Stage, graphs: RecordedGraphs, options: GraphOptions = OPTIONS) -> GraphPath:
    runner = use_graphs(stage, options, graphs)
    runner.capture_all(lambda: 0.0)
    return runner


@on_cpus
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param("llama", "float32", marks=pytest.mark.full),
        ("gemma3", "float32"),
        pytest.param("qwen2", "bfloat16", marks=pytest.mark.full),
    ],
)
def test_replays_equal_eager_steps(
    kind: str, dtype: str, tmp_path: Path, graphs: RecordedGraphs
) -> None:
    folder = save_tiny_model(kind, tmp_path, num_layers=NUM_LAYERS)
    ours, theirs = (
        load_stage(folder, WHOLE, NUM_BLOCKS, BLOCK_SIZE, dtype, attention="triton")
        for _ in range(2)
    )
    captured(ours, graphs)
    assert not ours.kv.data.any()
    for step in random_steps(7, seed=3):
        rows = np.arange(len(step.token_ids), dtype=np.int32)
        found, expected = (stage.logits(step, None, rows) for stage in (ours, theirs))
        # Tiles of other sizes round elsewhere.
        bound = BOUND if dtype == "float32" else 0.1
        torch.testing.assert_close(found, expected, rtol=0, atol=bound)
        torch.testing.assert_close(ours.kv.data, theirs.kv.data, rtol=0, atol=bound)
    assert len([count for count in graphs.num_replays if count]) > 1


@on_cpus
@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gemma2", marks=pytest.mark.full)])
def test_fused_modules_are_replayed_too(kind: str, tmp_path: Path, graphs: RecordedGraphs) -> None:
    """Modules of fused kernels, which stages on GPUs have."""
    part = load_slice(save_tiny_model(kind, tmp_path, num_layers=NUM_LAYERS), WHOLE, fused=True)
    stages = []
    for _ in range(2):
        kv = make_kv(part, NUM_BLOCKS, BLOCK_SIZE)
        backend, _ = choose_backend(kv, part.dtype, BLOCK_SIZE, 4, "triton")
        stages.append(Stage(PlainPath(part, kv, BLOCK_SIZE, backend)))
    captured(stages[0], graphs)
    for step in random_steps(2, seed=8):
        found, expected = (stage.run(step) for stage in stages)
        assert isinstance(found, StepOutput)
        assert isinstance(expected, StepOutput)
        np.testing.assert_array_equal(found.target_tokens, expected.target_tokens)
        ours, theirs = (stage.kv.data for stage in stages)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=BOUND)
    assert sum(graphs.num_replays) == 2


@on_cpus
def test_stages_hand_hidden_states_on(tmp_path: Path, graphs: RecordedGraphs) -> None:
    """What a stage gives stays as it is while the stage runs its next step."""
    folder = save_tiny_model("llama", tmp_path)
    spans = (LayerSpan(0, 1, 4), LayerSpan(1, 3, 4), LayerSpan(3, 4, 4))
    stages, peers = (
        [load_stage(folder, span, NUM_BLOCKS, BLOCK_SIZE, attention="triton") for span in spans]
        for _ in range(2)
    )
    for stage in stages:
        captured(stage, graphs)
    steps = list(random_steps(2, seed=1))
    hidden: list[torch.Tensor | None] = [None] * len(steps)
    for stage, peer in zip(stages, peers, strict=True):
        results = [stage.run(step, one) for step, one in zip(steps, hidden, strict=True)]
        for step, one, found in zip(steps, hidden, results, strict=True):
            expected = peer.run(step, one)
            if isinstance(expected, StepOutput):
                assert isinstance(found, StepOutput)
                np.testing.assert_array_equal(found.target_tokens, expected.target_tokens)
            else:
                torch.testing.assert_close(found, expected, rtol=0, atol=BOUND)
        hidden = [one if isinstance(one, torch.Tensor) else None for one in results]
    assert sum(graphs.num_replays) == len(stages) * len(steps)


def noting_stages(folder: Path, device: str = "cpu") -> list[Stage]:
    """Three stages that note states of layers."""
    options = StageOptions(feature_layers=(0, 3), attention="triton")
    return [
        load_stage(
            folder, LayerSpan(first, last, 4), NUM_BLOCKS, BLOCK_SIZE, device=device,
            options=options,
        )
        for first, last in ((0, 1), (1, 3), (3, 4))
    ]  # fmt: skip


def compare_noting_stages(stages: list[Stage], peers: list[Stage], bound: float) -> int:
    """Replays against eager steps; gives the number of steps."""
    steps = [replace(step, heads=HeadInput((0,))) for step in random_steps(3, seed=1)]
    for step in steps:
        hidden, expected = None, None
        for stage, peer in zip(stages, peers, strict=True):
            assert not isinstance(hidden, StepOutput)
            assert not isinstance(expected, StepOutput)
            hidden, expected = stage.run(step, hidden), peer.run(step, expected)
            if isinstance(hidden, torch.Tensor):
                torch.testing.assert_close(hidden, expected, rtol=0, atol=bound)
        assert isinstance(hidden, StepOutput)
        assert isinstance(expected, StepOutput)
        assert hidden.features is not None
        assert expected.features is not None
        np.testing.assert_allclose(hidden.features, expected.features, rtol=0, atol=bound)
    return len(steps)


@on_cpus
@pytest.mark.full
def test_states_between_layers_are_noted_in_a_graph(tmp_path: Path, graphs: RecordedGraphs) -> None:
    folder = save_tiny_model("llama", tmp_path)
    stages, peers = noting_stages(folder), noting_stages(folder)
    for stage in stages:
        captured(stage, graphs)
    num_steps = compare_noting_stages(stages, peers, BOUND)
    assert sum(graphs.num_replays) == len(stages) * num_steps


@pytest.mark.gpu
def test_states_between_layers_are_noted_in_a_cuda_graph(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path)
    stages, peers = noting_stages(folder, "cuda"), noting_stages(folder, "cuda")
    for stage in stages:
        use_graphs(stage, OPTIONS, CudaCapture(torch.device("cuda"))).capture_all(lambda: 0.0)
    assert compare_noting_stages(stages, peers, 1e-2) > 0


@on_cpus
def test_heads_of_a_stage_have_its_capture(tmp_path: Path, graphs: RecordedGraphs) -> None:
    folder = save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    stage, given = load_stage(folder, WHOLE, NUM_BLOCKS, BLOCK_SIZE, attention="triton"), []
    for path in (stage.path, use_graphs(stage, OPTIONS, graphs)):
        Stage(path, lambda parts: given.append(parts.capture) or [])
    assert given == [None, graphs]


@on_cpus
def test_steps_that_fit_no_graph_run_eagerly(tmp_path: Path, graphs: RecordedGraphs) -> None:
    folder = save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    ours, theirs = (
        load_stage(folder, WHOLE, NUM_BLOCKS, BLOCK_SIZE, attention="triton") for _ in range(2)
    )
    captured(ours, graphs, GraphOptions(max_rows=4, max_requests=2, max_positions=20))
    request, *others = (PagedRequest(range(first, first + 8), BLOCK_SIZE) for first in (0, 8, 16))
    steps = [
        make_step([request.chunk(list(range(2, 20)), 0)]),  # too many rows
        make_step([request.chunk([5], 18)]),
        make_step([request.chunk([5, 6], 19)]),  # a position that is too high
        make_step([one.chunk([7], 0) for one in (*others, request)][:3]),  # too many requests
        make_step([]),
        make_step([request.chunk([5], 19)], moves=[(3, 30)]),
    ]
    for step, num_replays in zip(steps, (0, 1, 1, 1, 1, 2), strict=True):
        found, expected = (stage.run(step) for stage in (ours, theirs))
        assert isinstance(found, StepOutput)
        assert isinstance(expected, StepOutput)
        np.testing.assert_array_equal(found.target_tokens, expected.target_tokens)
        assert sum(graphs.num_replays) == num_replays
    torch.testing.assert_close(ours.kv.data, theirs.kv.data, rtol=0, atol=BOUND)


@on_cpus
def test_the_smallest_graph_that_was_captured_in_time_runs(
    tmp_path: Path, graphs: RecordedGraphs
) -> None:
    folder = save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    stage = load_stage(folder, WHOLE, NUM_BLOCKS, BLOCK_SIZE, attention="triton")
    runner = use_graphs(stage, OPTIONS, graphs)
    shown: list[int] = []
    times = iter([0.0, 1.0, 61.0, 62.0])
    report = runner.capture_all(lambda: next(times), shown.append)
    assert report == GraphReport(captured=(12, 8), given_up=(4, 2, 1), seconds=62.0)
    assert shown == [12, 8]
    request = PagedRequest([1, 2, 3], BLOCK_SIZE)
    for count, start in ((9, 0), (1, 9)):
        stage.run(make_step([request.chunk([4] * count, start)]))
    assert graphs.num_replays == [1, 1]


@on_cpus
def test_requests_of_few_rows_have_graphs_of_small_tiles(
    tmp_path: Path, graphs: RecordedGraphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 8 rows each: 16 lines, where a request of 18 rows has 64."""
    monkeypatch.setattr(gpu_path, "SMALL_ROWS", ())
    folder = save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    ours, theirs = (
        load_stage(folder, WHOLE, NUM_BLOCKS, BLOCK_SIZE, attention="triton") for _ in range(2)
    )
    runner = use_graphs(ours, GraphOptions(max_rows=20, max_requests=3, max_positions=64), graphs)
    assert runner.capture_all(lambda: 0.0) == GraphReport((20,), (), 0.0, narrow=(20,))
    alone, *several = (PagedRequest(range(first, first + 8), BLOCK_SIZE) for first in (0, 8, 16))
    few = [one.chunk([5, 6, 7, 8, 9, 10, 11, 12], 0) for one in several]
    steps = [
        make_step([alone.chunk(list(range(2, 20)), 0)]),
        make_step([*few, alone.chunk([7], 18)]),
    ]
    for step in steps:
        rows = np.arange(len(step.token_ids), dtype=np.int32)
        found, expected = (stage.logits(step, None, rows) for stage in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=0, atol=BOUND)
    assert graphs.num_replays == [1, 1]


def test_rows_of_graphs_end_at_the_largest_step() -> None:
    assert rows_of_graphs(12) == (1, 2, 4, 8, 12)
    # A tree of 64 nodes and its root.
    assert min(rows for rows in rows_of_graphs(8192) if rows >= 65) == 72
    assert rows_of_graphs(256)[-3:] == (128, 192, 256)
    assert rows_of_graphs(8192)[-3:] == (256, 384, 512)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_cuda_graphs_equal_eager_steps(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_model(kind, tmp_path, num_layers=NUM_LAYERS)
    ours, theirs = (
        load_stage(folder, WHOLE, NUM_BLOCKS, BLOCK_SIZE, device="cuda", attention="triton")
        for _ in range(2)
    )
    report = use_graphs(ours, OPTIONS, CudaCapture(torch.device("cuda"))).capture_all(lambda: 0.0)
    assert not report.given_up
    assert not ours.kv.data.any()
    for step in random_steps(7, seed=3):
        rows = np.arange(len(step.token_ids), dtype=np.int32)
        found, expected = (stage.logits(step, None, rows) for stage in (ours, theirs))
        # cuBLAS chooses another kernel for another number of rows, and may use TF32.
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-2)
        torch.testing.assert_close(ours.kv.data, theirs.kv.data, rtol=0, atol=1e-2)


def all_answers(stage: Stage, steps: list[StepInput], *, ahead: bool) -> list[StepOutput]:
    """With everything that a step can ask for; `ahead`: all are launched before one is read."""
    launched, answers = [], []
    for step in steps:
        rows = np.arange(len(step.token_ids), dtype=np.int32)
        asked = replace(
            step, log_probs=LogProbInput(
                of_targets=True, num_top=2, with_entropies=True, scored_rows=rows[-1:],
                scored_tokens=step.token_ids[-1:],
            ), probes=ProbeInput(rows[:1], 3),
        )  # fmt: skip
        answer = stage.launch(asked)
        assert not isinstance(answer, torch.Tensor)
        if ahead:
            launched.append(answer)
        else:
            answers.append(answer())
    return answers or [answer() for answer in launched]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_launched_ahead_answer_as_one_after_the_other(device: str, tmp_path: Path) -> None:
    """On a GPU nothing in a launch waits for the device."""
    folder = save_tiny_model("llama", tmp_path, num_layers=NUM_LAYERS)
    ours, theirs = (
        load_stage(folder, WHOLE, NUM_BLOCKS, BLOCK_SIZE, device=device) for _ in range(2)
    )
    if device == "cuda":
        use_graphs(ours, OPTIONS, CudaCapture(torch.device(device))).capture_all(lambda: 0.0)
        use_graphs(theirs, OPTIONS, CudaCapture(torch.device(device))).capture_all(lambda: 0.0)
        # Kernels of the head and of sampling are compiled at their first call.
        all_answers(ours, list(random_steps(7, seed=5)), ahead=True)
        ours.kv.data.zero_()
        torch.cuda.set_sync_debug_mode("error")
    steps = list(random_steps(7, seed=3))
    try:
        found = all_answers(ours, steps, ahead=True)
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(found, all_answers(theirs, steps, ahead=False), strict=True):
        one_fields, other_fields = (tree_leaves(asdict(output)) for output in (one, other))
        for mine, its in zip(one_fields, other_fields, strict=True):
            np.testing.assert_array_equal(mine, its)
        assert len(one.target_tokens) == len(other.target_tokens) > 0
