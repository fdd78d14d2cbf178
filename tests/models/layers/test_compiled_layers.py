"""Compiled stages against eager ones, which `test_stage.py` holds against transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.core.steps import StepOutput
from draftline.models.layers import compiled_layers
from draftline.models.load.partition import LayerSpan, partition_layers
from draftline.models.stage.options import StageOptions
from draftline.models.stage.stage import Stage, load_stage
from support.inputs.feature_sums import NOTED, SUMS, WIDTH, load_matrices
from support.inputs.steps import BLOCK_SIZE, PagedRequest, Rows, make_step
from support.tools.tiny_models import KINDS, VOCAB_SIZE, save_tiny_model
from torch._dynamo.utils import counters

# Inductor imports parts of torch that torch itself deprecates.
pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

TOKENS = np.random.default_rng(5).integers(2, VOCAB_SIZE, 60).tolist()
NODES, PARENTS = [5, 6, 7, 8, 9, 10, 11], [-1, 0, 0, 1, -1, 4, 3]
NUM_BLOCKS = 60
# Without C++ code for each kind; the graph, its operators and its shapes are the same.
QUICK = ["llama_scaled_rope", "mistral", "qwen2_windowed", "qwen3", "gemma", "gemma2", "gemma3"]


def stages(
    kind: str, folder: Path, cache: Path, num_layers: int | None = None
) -> tuple[Stage, Stage]:
    """An eager stage and a compiled one."""
    save_tiny_model(kind, folder, num_layers=num_layers)
    layers = num_layers or KINDS[kind].config().num_hidden_layers
    load = partial(load_stage, folder, LayerSpan(0, layers, layers), NUM_BLOCKS, BLOCK_SIZE)
    return load(), load(options=compiled_in(cache))


def compiled_in(cache: Path | None) -> StageOptions | None:
    return None if cache is None else StageOptions(compile="on", compile_cache=str(cache))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", autouse=True)
def graphs_stay_here(cache: Path) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(compiled_layers.GRAPH_CACHE, str(cache / "graphs"))
        yield


def assert_same_logits(eager: Stage, compiled: Stage, steps: list[list[Rows]]) -> None:
    for requests in steps:
        step = make_step(requests)
        rows = np.arange(len(step.token_ids), dtype=np.int32)
        ours, theirs = (stage.logits(step, None, rows) for stage in (compiled, eager))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
        torch.testing.assert_close(compiled.kv.data, eager.kv.data, rtol=0, atol=1e-4)


def steps() -> list[list[Rows]]:
    """Prompts, chunks, single tokens, trees, and all of them in one step."""
    scattered, straight, late = (
        PagedRequest(blocks)
        for blocks in ([9, 3, 8, 2, 30, 1, 29, 28], range(10, 18), range(40, 48))
    )
    return [
        [scattered.chunk(TOKENS[:18], 0)],
        [straight.chunk(TOKENS[:1], 0)],
        [scattered.tree(NODES, PARENTS, 18), straight.chunk(TOKENS[1:12], 1)],
        [scattered.chunk(TOKENS[18:19], 18)],
        [
            straight.tree(NODES[:2], PARENTS[:2], 12),
            late.chunk(TOKENS[:3], 0),
            scattered.chunk(TOKENS[19:21], 19),
        ],
    ]


@pytest.mark.parametrize("kind", QUICK)
def test_logits_equal_eager_ones(
    kind: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    assert_same_logits(*stages(kind, tmp_path, cache, num_layers=2), steps())


@pytest.mark.full
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logits_equal_eager_ones_in_generated_code(kind: str, tmp_path: Path, cache: Path) -> None:
    eager, compiled = stages(kind, tmp_path, cache)
    assert_same_logits(eager, compiled, steps())


def test_one_graph_serves_every_step_and_texts_are_equal(tmp_path: Path, cache: Path) -> None:
    before = counters["stats"]["unique_graphs"]
    eager, compiled = stages("llama", tmp_path, cache)
    assert_same_logits(eager, compiled, steps())
    request = PagedRequest(range(20, 40))
    for rows in (*range(1, 20), 33, 64, 65):
        assert_same_logits(eager, compiled, [[request.chunk((TOKENS * 2)[:rows], 0)]])
    texts = [greedy(stage, request) for stage in (eager, compiled)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 3
    assert_rows_do_not_depend_on_their_company(compiled)
    assert counters["stats"]["unique_graphs"] == before + 1


def assert_rows_do_not_depend_on_their_company(stage: Stage) -> None:
    """Logits are the same bit by bit in a prompt, alone, in a tree, and beside a stranger."""
    request, stranger = PagedRequest(range(1, 16)), PagedRequest(range(20, 40))

    def logits(*requests: Rows) -> torch.Tensor:
        step = make_step(requests)
        return stage.logits(step, None, np.arange(len(step.token_ids), dtype=np.int32))

    alone = [logits(request.chunk(TOKENS[at : at + 1], at)) for at in range(40)]
    prompt = logits(request.chunk(TOKENS[:40], 0))
    assert torch.equal(prompt, torch.cat(alone))
    chain = range(-1, 9)
    tree = logits(
        request.tree([*TOKENS[30:40], 9], [*chain, 2], 30), stranger.chunk(TOKENS[:33], 0)
    )
    assert torch.equal(tree[:10], prompt[30:40])
    assert torch.equal(tree[11:], prompt[:33])


def greedy(stage: Stage, request: PagedRequest) -> list[int]:
    tokens, done = TOKENS[:9], 0
    while len(tokens) < 40:
        output = stage.run(make_step([request.chunk(tokens[done:], done)]), None)
        assert isinstance(output, StepOutput)
        done = len(tokens)
        tokens.append(int(output.target_tokens[-1]))
    return tokens[9:]


def test_stages_of_one_process_do_not_share_a_graph(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_layers, "BACKEND", "aot_eager")
    save_tiny_model("llama", tmp_path)
    halves = [LayerSpan(0, 2, 4), LayerSpan(2, 4, 4)]
    pipelines = [
        [load_stage(tmp_path, span, 30, BLOCK_SIZE, options=compiled_in(kept)) for span in halves]
        for kept in (None, cache)
    ]
    step = make_step([PagedRequest([3, 4, 5]).chunk(TOKENS[:9], 0)])
    rows = np.arange(9, dtype=np.int32)
    logits = [last.logits(step, first.run(step, None), rows) for first, last in pipelines]
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
@pytest.mark.parametrize("count", [1, 3])
def test_states_between_layers_are_handed_out(
    count: int, backend: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States of layers and sums of them: what is noted is part of the one graph."""
    monkeypatch.setattr(compiled_layers, "BACKEND", backend)
    save_tiny_model("llama", tmp_path)
    before = counters["stats"]["unique_graphs"]
    eager, compiled = (
        [
            load_stage(
                tmp_path, span, 30, BLOCK_SIZE, load_projections=load_matrices,
                options=StageOptions(
                    feature_layers=NOTED, feature_sums=SUMS, compile=mode, compile_cache=str(cache)
                ),
            )
            for span in partition_layers(tmp_path, count)
        ]
        for mode in ("off", "on")
    )  # fmt: skip
    assert counters["stats"]["unique_graphs"] == before + count
    request = PagedRequest(range(3, 9))
    for rows in (request.chunk(TOKENS[:9], 0), request.tree(NODES, PARENTS, 9)):
        ours, theirs = (features_of(stages, rows) for stages in (compiled, eager))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def features_of(stages: list[Stage], rows: Rows) -> np.ndarray:
    step, hidden = replace(make_step([rows]), feature_requests=(0,)), None
    for stage in stages:
        assert not isinstance(hidden, StepOutput)
        hidden = stage.run(step, hidden)
    assert isinstance(hidden, StepOutput)
    assert hidden.features is not None
    assert hidden.features.shape[1] == len(NOTED) * WIDTH + sum(one.size for one in SUMS)
    return hidden.features


def test_a_number_format_that_cannot_be_compiled_is_refused(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"compile: on supports float32 .* bfloat16"):
        load_stage(
            tmp_path, LayerSpan(0, 4, 4), 10, BLOCK_SIZE, "bfloat16", options=compiled_in(tmp_path)
        )


def test_a_compilation_that_fails_is_an_error(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(compiled_layers, "BACKEND", broken)
    save_tiny_model("llama", tmp_path)
    with pytest.raises(ConfigError, match=r"compile: on failed: .*no such kernel"):
        load_stage(tmp_path, LayerSpan(0, 4, 4), 10, BLOCK_SIZE, options=compiled_in(cache))
