"""Stages of transformers' layers replay graphs, too, with what their layers keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline.core.steps import StepInput, StepOutput
from draftline.kernels.dispatch import load_recurrence
from draftline.models.attention.backend import choose_backend
from draftline.models.layers.model_slice import cut_slice, load_slice
from draftline.models.load.partition import LayerSpan
from draftline.models.load.supported import empty_model
from draftline.models.recurrence.state_pool import StatePool
from draftline.models.stage import gpu_path
from draftline.models.stage.gpu_path import CudaCapture, GraphOptions, GraphPath
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.plain_path import PlainPath, make_kv
from draftline.models.stage.stage import Stage
from support.fakes.recorded_graph import NoHostReads, RecordedGraphs
from support.inputs.random_steps import BLOCK_SIZE, NUM_BLOCKS, random_steps
from support.tools.graph_paths import use_graphs
from support.tools.tiny_models import FORWARD_KINDS, save_tiny_model, tiny_config
from torch import Tensor

OPTIONS = GraphOptions(max_rows=12, max_requests=3, max_positions=64)
WHOLE = LayerSpan(0, 4, 4)
BOUND = 1e-4
on_cpus = pytest.mark.skipif(torch.cuda.is_available(), reason="records the interpreter's kernels")
KINDS = [
    ("qwen3_5_text", 4),
    ("falcon_h1", 2),
    ("granite", 2),
    ("deepseek_v3", 2),
    pytest.param("kimi_linear", 4, marks=pytest.mark.full),
    pytest.param("minicpm3", 2, marks=pytest.mark.full),
    pytest.param("qwen3_next", 4, marks=pytest.mark.full),
    pytest.param("nemotron_h", 4, marks=pytest.mark.full),
    pytest.param("lfm2", 4, marks=pytest.mark.full),
    pytest.param("qwen3_moe", 2, marks=pytest.mark.full),
]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> RecordedGraphs:
    # Interpreted, each takes its time.
    monkeypatch.setattr(gpu_path, "SMALL_ROWS", (4,))
    return RecordedGraphs(monkeypatch)


def stage_of(folder: Path, span: LayerSpan = WHOLE, *, num_kept_rows: int = 64) -> Stage:
    """By the kernels of GPUs, interpreted."""
    part = load_slice(folder, span)
    kv = make_kv(part, NUM_BLOCKS, BLOCK_SIZE)
    backend, _ = choose_backend(kv, part.dtype, BLOCK_SIZE, 4, "triton")
    assert part.forward is not None
    states = None
    if part.forward.state_shapes:
        rule, like = load_recurrence("triton"), torch.empty(0)
        shapes = part.forward.state_shapes
        states = StatePool(shapes, 3, num_kept_rows, BLOCK_SIZE, like, rule)
    return Stage(PlainPath(part, kv, BLOCK_SIZE, backend, states=states))


def logits(stage: Stage, step: StepInput, hidden: Tensor | None = None) -> Tensor:
    return stage.logits(step, hidden, np.arange(len(step.token_ids), dtype=np.int32))


def assert_alike(ours: Stage, theirs: Stage) -> None:
    """What they keep of texts."""
    torch.testing.assert_close(ours.kv.data, theirs.kv.data, rtol=0, atol=BOUND)
    if ours.path.states is None or theirs.path.states is None:
        return
    for mine, other in zip(ours.path.states.layers, theirs.path.states.layers, strict=True):
        torch.testing.assert_close(mine.states, other.states, rtol=0, atol=BOUND)
        assert not mine.inputs[0].any()


@on_cpus
@pytest.mark.parametrize(("kind", "num_layers"), KINDS)
def test_replays_equal_eager_steps(
    kind: str, num_layers: int, tmp_path: Path, graphs: RecordedGraphs
) -> None:
    folder = save_tiny_model(kind, tmp_path, num_layers=num_layers)
    span = LayerSpan(0, num_layers, num_layers)
    ours, theirs = stage_of(folder, span), stage_of(folder, span)
    report = use_graphs(ours, OPTIONS, graphs).capture_all(lambda: 0.0)
    assert report.captured == (12, 4)
    for step in random_steps(5, seed=3):
        found, expected = (logits(stage, step) for stage in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=0, atol=BOUND)
        assert_alike(ours, theirs)
    # Also those in which texts begin.
    assert sum(graphs.num_replays) == 5


@on_cpus
def test_stages_hand_hidden_states_on(tmp_path: Path, graphs: RecordedGraphs) -> None:
    """Also a stage without attention."""
    folder = save_tiny_model("qwen3_5_text", tmp_path)
    spans = LayerSpan(0, 2, 4), LayerSpan(2, 4, 4)
    stages, peers = ([stage_of(folder, span) for span in spans] for _ in range(2))
    for stage in stages:
        use_graphs(stage, OPTIONS, graphs).capture_all(lambda: 0.0)
    for step in random_steps(4, seed=5):
        hidden, expected = stages[0].run(step), peers[0].run(step)
        assert isinstance(hidden, Tensor)
        assert isinstance(expected, Tensor)
        torch.testing.assert_close(hidden, expected, rtol=0, atol=BOUND)
        found, wanted = logits(stages[1], step, hidden), logits(peers[1], step, expected)
        torch.testing.assert_close(found, wanted, rtol=0, atol=BOUND)
    assert sum(graphs.num_replays) == 8


def poison(path: GraphPath) -> None:
    """What rows of padding leave, and what is behind the rows of a step."""
    for layer in () if path.states is None else path.states.layers:
        first_kept = 1 + path.states.num_slots * (layer.shape.width - 1)
        layer.inputs[first_kept] = torch.nan
        for kept in (layer.keys, layer.log_decays, layer.deltas):
            kept[0] = torch.nan
    for buffer in (path._hidden, path._out, path._attended):
        buffer.fill_(torch.nan)


@on_cpus
@pytest.mark.parametrize(
    "kind", ["qwen3_5_text", "minicpm3", pytest.param("falcon_h1", marks=pytest.mark.full)]
)
def test_rows_of_padding_change_no_bit(kind: str, tmp_path: Path, graphs: RecordedGraphs) -> None:
    folder = save_tiny_model(kind, tmp_path)
    ours, theirs = stage_of(folder), stage_of(folder)
    paths = [use_graphs(stage, OPTIONS, graphs) for stage in (ours, theirs)]
    for path in paths:
        path.capture_all(lambda: 0.0)
    for step in random_steps(5, seed=11):
        poison(paths[0])
        found, expected = (logits(stage, step) for stage in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(ours.kv.data, theirs.kv.data, rtol=0, atol=0)
    for mine, other in zip(*(path.states.layers for path in paths if path.states), strict=True):
        torch.testing.assert_close(mine.states, other.states, rtol=0, atol=0)


@on_cpus
def test_steps_that_copy_states_run_eagerly(tmp_path: Path, graphs: RecordedGraphs) -> None:
    folder = save_tiny_model("qwen3_5_text", tmp_path)
    ours, theirs = stage_of(folder), stage_of(folder)
    use_graphs(ours, OPTIONS, graphs).capture_all(lambda: 0.0)
    first, *rest = random_steps(2, seed=2)
    slots = first.state_slots
    copies = np.array([[slots[0], 3 - slots[0] - slots[-1]]], dtype=np.int32)
    for step in (replace(first, state_saves=copies), *rest):
        torch.testing.assert_close(logits(ours, step), logits(theirs, step), rtol=0, atol=BOUND)
        assert_alike(ours, theirs)
    assert sum(graphs.num_replays) == 1


@on_cpus
def test_a_pool_that_grows_has_no_graphs_any_more(
    tmp_path: Path, graphs: RecordedGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_model("lfm2", tmp_path)
    ours, theirs = stage_of(folder, num_kept_rows=8), stage_of(folder)
    use_graphs(ours, OPTIONS, graphs).capture_all(lambda: 0.0)
    for step in random_steps(8, seed=3):
        torch.testing.assert_close(logits(ours, step), logits(theirs, step), rtol=0, atol=BOUND)
    assert_alike(ours, theirs)
    assert 0 < sum(graphs.num_replays) < 8
    assert caplog.text.count("event=graphs_dropped") == 1


@on_cpus
def test_layers_that_wait_for_the_device_run_eagerly(
    tmp_path: Path, graphs: RecordedGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_model("granite", tmp_path)
    ours, theirs = stage_of(folder), stage_of(folder)

    def look(_module: Any, _args: Any, states: Tensor) -> None:
        assert bool(states.isfinite().all())

    ours.path.part.layers[1].register_forward_hook(look)
    report = use_graphs(ours, OPTIONS, graphs).capture_all(lambda: 0.0)
    assert report.captured == ()
    assert caplog.text.count("event=graphs_not_captured model_type=granite") == 1
    for step in random_steps(2, seed=1):
        torch.testing.assert_close(logits(ours, step), logits(theirs, step), rtol=0, atol=0)


class _Attention:
    """Of a device that is not there."""

    def write_heads(self, *_rows: object) -> None:
        pass

    def attend(self, _layer: int, query: Tensor, *_options: object) -> Tensor:
        return torch.empty_like(query)


class _States:
    """The same."""

    def convolve(self, _layer: int, inputs: Tensor, *_weights: object) -> Tensor:
        return inputs.clone()

    def scan(self, _layer: int, _queries: Tensor, _keys: Tensor, values: Tensor, *_: object) -> Any:
        return torch.empty_like(values, dtype=torch.float32)


@torch.inference_mode()
def obstacle_of(kind: str) -> str | None:
    """Why layers of a kind cannot be captured, by operations on a device without numbers."""
    device, dtype = torch.device("meta"), torch.bfloat16
    whole = empty_model(tiny_config(kind)).to(dtype)
    count = whole.config.num_hidden_layers
    forward: Any = cut_slice(whole, LayerSpan(0, count, count), dtype, device, fused=False).forward
    if forward.wants_torch:
        return None
    place = torch.zeros(5, dtype=torch.int64, device=device)
    try:
        with NoHostReads():
            states = forward.embedded(place, place)
            forward.run(states, place, place, _Attention(), slice(None), _States())
    except RuntimeError as error:
        return str(error)
    return None


def test_the_layers_of_nearly_all_kinds_can_be_captured() -> None:
    obstacles = {kind: obstacle_of(kind) for kind in FORWARD_KINDS}
    found = {kind: reason for kind, reason in obstacles.items() if reason is not None}
    # Its frequencies are no buffer, so that each pass copies them to the device.
    assert found.keys() == {"phimoe"}, found
    assert "copies between devices" in str(found["phimoe"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "lfm2", "granite", "deepseek_v3"])
def test_cuda_graphs_equal_eager_steps(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_model(kind, tmp_path)
    ours, theirs = (
        load_stage(folder, WHOLE, NUM_BLOCKS, BLOCK_SIZE, device="cuda", attention="triton")
        for _ in range(2)
    )
    report = use_graphs(ours, OPTIONS, CudaCapture(torch.device("cuda"))).capture_all(lambda: 0.0)
    assert not report.given_up
    for step in random_steps(7, seed=3):
        found, expected = ours.run(step), theirs.run(step)
        assert isinstance(found, StepOutput)
        assert isinstance(expected, StepOutput)
        torch.testing.assert_close(ours.kv.data, theirs.kv.data, rtol=0, atol=1e-2)
