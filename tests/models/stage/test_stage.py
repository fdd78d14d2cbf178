"""A stage's logits against transformers' own, for every kind of model and of step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.proposals import Proposal
from draftline.core.steps import LogitEdits, StepInput, StepOutput, Verification, VerificationResult
from draftline.core.tree.merge import merge
from draftline.core.verify.rules import candidates_of
from draftline.models.load.partition import LayerSpan, partition_layers
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.stage import Stage
from support.inputs.steps import BLOCK_SIZE, PagedRequest, Rows, make_step
from support.tools.tiny_models import KINDS, VOCAB_SIZE, save_tiny_model
from transformers import AutoModelForCausalLM

NUM_BLOCKS = 40
TOKENS = np.random.default_rng(0).integers(2, VOCAB_SIZE, 64).astype(int).tolist()
# A tree of 7 nodes below the context, with two roots; node i's parent is PARENTS[i].
NODES, PARENTS = [5, 6, 7, 8, 9, 10, 11], [-1, 0, 0, 1, -1, 4, 3]


class Target:
    """A tiny model as transformers runs it, and as a chain of stages."""

    def __init__(self, folder: Path, num_stages: int = 1) -> None:
        self.folder = folder
        self.peer = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        self.spans = partition_layers(folder, num_stages)
        self.clear()

    def clear(self) -> None:
        self.stages = [load_stage(self.folder, span, NUM_BLOCKS, BLOCK_SIZE) for span in self.spans]

    def logits(self, requests: Sequence[Rows], moves: object = ()) -> np.ndarray:
        step = make_step(requests, moves=moves)
        hidden = None
        for stage in self.stages[:-1]:
            hidden = stage.run(step, hidden)
            assert isinstance(hidden, torch.Tensor)
        return self.stages[-1].logits(step, hidden, np.arange(len(step.token_ids))).numpy()

    @cache  # noqa: B019 - lives as long as the module's fixture
    def expected(self, *tokens: int) -> np.ndarray:
        """transformers' logits after each of `tokens`."""
        with torch.no_grad():
            return self.peer(torch.tensor([tokens])).logits[0].numpy()


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def path_to(node: int, nodes: Sequence[int] = NODES) -> list[int]:
    path = []
    while node >= 0:
        path.insert(0, nodes[node])
        node = PARENTS[node]
    return path


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = tmp_path_factory.mktemp(request.param)
    return Target(save_tiny_model(request.param, folder))


@pytest.fixture(autouse=True)
def empty_cache(request: pytest.FixtureRequest) -> None:
    if "target" in request.fixturenames:
        request.getfixturevalue("target").clear()


def test_a_whole_prompt(target: Target) -> None:
    request = PagedRequest([3, 9, 4, 1, 7, 12, 13, 14, 15, 20])
    assert_same(target.logits([request.chunk(TOKENS[:37], 0)]), target.expected(*TOKENS[:37]))


def test_a_prompt_in_chunks_then_one_token_at_a_time(target: Target) -> None:
    request = PagedRequest([11, 3, 8, 2, 30, 1, 39])
    bounds = [0, 9, 10, 21, 22, 23, 24, 25, 26, 27]
    parts = [
        target.logits([request.chunk(TOKENS[first:last], first)])
        for first, last in pairwise(bounds)
    ]
    assert_same(np.concatenate(parts), target.expected(*TOKENS[:27]))


def test_every_path_of_a_tree(target: Target) -> None:
    request = PagedRequest([30, 3, 8, 2, 31, 1, 9])
    target.logits([request.chunk(TOKENS[:18], 0)])
    ours = target.logits([request.tree(NODES, PARENTS, 18)])
    for node, row in enumerate(ours):
        assert_same(row, target.expected(*TOKENS[:18], *path_to(node))[-1])


def test_a_tree_streamed_in_two_steps(target: Target) -> None:
    request = PagedRequest([2, 9, 4, 1, 7, 12, 13])
    target.logits([request.chunk(TOKENS[:18], 0)])
    target.logits([request.tree(NODES[:4], PARENTS[:4], 18)])
    ours = target.logits([request.tree(NODES, PARENTS, 18, in_flight=4)])
    for node, row in enumerate(ours, start=4):
        assert_same(row, target.expected(*TOKENS[:18], *path_to(node))[-1])


def test_an_accepted_path_is_moved_and_continued(target: Target) -> None:
    request = PagedRequest([2, 9, 4, 1, 7, 12, 13])
    target.logits([request.chunk(TOKENS[:18], 0)])
    target.logits([request.tree(NODES, PARENTS, 18)])
    path = [0, 1, 3, 6]
    scratch = request.slots(18, len(NODES))
    moves = list(zip(scratch[path].tolist(), request.slots(18, 4).tolist(), strict=True))
    ours = target.logits([request.chunk([50, 51], 22)], moves=moves)
    assert_same(ours, target.expected(*TOKENS[:18], *path_to(6), 50, 51)[-2:])


def test_unlike_requests_share_a_step(target: Target) -> None:
    """Long and short contexts, a prompt, a chunk, single tokens and trees, in odd order."""
    lens = [30, 3, 18, 1, 0, 29]
    requests = [PagedRequest(blocks) for blocks in np.arange(120).reshape(6, 20)[:, ::-1].tolist()]
    target.stages = [load_stage(target.folder, span, 120, BLOCK_SIZE) for span in target.spans]
    texts = [TOKENS[index : index + length] for index, length in enumerate(lens)]
    filled = [r.chunk(t, 0) for r, t in zip(requests, texts, strict=True) if t]
    target.logits(filled)
    step = [
        requests[0].tree(NODES, PARENTS, 30),
        requests[1].chunk([40], 3),
        requests[2].tree([60, 61], [-1, -1], 18),
        requests[3].chunk([41], 1),
        requests[4].chunk(TOKENS[:11], 0),
        requests[5].chunk([42, 43, 44], 29),
    ]
    rows = iter(target.logits(step))
    for node in range(len(NODES)):
        assert_same(next(rows), target.expected(*texts[0], *path_to(node))[-1])
    assert_same(next(rows), target.expected(*texts[1], 40)[-1])
    for token in (60, 61):
        assert_same(next(rows), target.expected(*texts[2], token)[-1])
    assert_same(next(rows), target.expected(*texts[3], 41)[-1])
    for row in target.expected(*TOKENS[:11]):
        assert_same(next(rows), row)
    for row in target.expected(*texts[5], 42, 43, 44)[-3:]:
        assert_same(next(rows), row)
    assert next(rows, None) is None


@pytest.mark.parametrize(
    ("kind", "num_stages"), [("llama_deep", 3), ("llama_deep", 8), ("gemma3", 2)]
)
def test_any_number_of_stages(kind: str, num_stages: int, tmp_path: Path) -> None:
    num_layers = KINDS[kind].config().num_hidden_layers
    target = Target(save_tiny_model(kind, tmp_path), min(num_stages, num_layers))
    assert [stage.is_first for stage in target.stages].index(True) == 0
    assert [stage.is_last for stage in target.stages].index(True) == len(target.stages) - 1
    request = PagedRequest([2, 9, 4, 1, 7, 12, 13])
    target.logits([request.chunk(TOKENS[:18], 0)])
    ours = target.logits([request.tree(NODES, PARENTS, 18)])
    for node, row in enumerate(ours):
        assert_same(row, target.expected(*TOKENS[:18], *path_to(node))[-1])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "mixtral"])
def test_the_bytes_of_its_weights(kind: str, tmp_path: Path) -> None:
    folder = save_tiny_model(kind, tmp_path)
    peer = AutoModelForCausalLM.from_pretrained(folder)
    whole = sum(parameter.numel() for parameter in peer.parameters())
    # A tied head is the last stage's own.
    tied = peer.config.tie_word_embeddings * peer.get_output_embeddings().weight.numel()
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        stages = [
            load_stage(folder, span, 1, BLOCK_SIZE, dtype) for span in partition_layers(folder, 2)
        ]
        held = sum(stage.memory.weights for stage in stages)
        assert held == pytest.approx(size * (whole + tied), rel=0.02)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target(save_tiny_model("llama", tmp_path_factory.mktemp("llama")))


def run(stage: Stage, step: StepInput) -> StepOutput:
    output = stage.run(step, None)
    assert isinstance(output, StepOutput)
    return output


def test_run_answers_what_was_asked_of_each_row(llama: Target) -> None:
    llama.clear()
    step = make_step(
        [PagedRequest([1, 2, 3, 4]).chunk(TOKENS[:12], 0)],
        logits_rows=[11, 2], probe_rows=[5, 11], probe_top_k=3,
        scored_rows=[0, 7, 7], scored_tokens=[TOKENS[1], 9, 10], step_id=77,
    )  # fmt: skip
    output = run(llama.stages[0], step)
    theirs = llama.expected(*TOKENS[:12])
    assert output.step_id == 77
    assert output.target_tokens.tolist() == theirs[[11, 2]].argmax(axis=-1).tolist()
    scores = output.log_probs.scores
    assert output.probe_ids is not None
    assert scores is not None
    assert output.probe_ids.tolist() == np.argsort(-theirs[[5, 11]])[:, :3].tolist()
    log_probs = torch.log_softmax(torch.from_numpy(theirs), -1).numpy()
    np.testing.assert_allclose(scores, log_probs[[0, 7, 7], [TOKENS[1], 9, 10]], rtol=0, atol=1e-4)
    dtypes = (output.target_tokens.dtype, output.probe_ids.dtype, scores.dtype)
    assert dtypes == (np.int32, np.int32, np.float32)


def test_what_drafters_hear_of_a_row_is_not_edited_with_its_answer(llama: Target) -> None:
    llama.clear()
    step = make_step(
        [PagedRequest([1, 2, 3, 4]).chunk(TOKENS[:6], 0)],
        logits_rows=[1, 3, 5], probe_rows=[1, 3, 5], probe_top_k=2,
    )  # fmt: skip
    best = llama.expected(*TOKENS[:6])[[1, 3, 5]].argmax(axis=-1).tolist()
    bias = np.full(len(best), -1e4, dtype=np.float32)
    edits = LogitEdits(0, 3, np.array(best, dtype=np.int32), bias, None, None)
    output = run(llama.stages[0], replace(step, edits=(edits,)))
    assert output.probe_ids is not None
    assert output.probe_ids[:, 0].tolist() == best
    assert not set(output.target_tokens.tolist()) & set(best)


def test_a_rule_s_verification_results_come_back_with_what_was_committed(llama: Target) -> None:
    llama.clear()
    request = PagedRequest([2, 9, 4, 1, 7])
    llama.logits([request.chunk(TOKENS[:9], 0)])
    best = int(llama.expected(*TOKENS[:10])[-1].argmax())
    then = int(llama.expected(*TOKENS[:10], best)[-1].argmax())
    # The second child of the root is right, and the token after it stands below it.
    nodes, parents = [(best + 1) % VOCAB_SIZE, best, (then + 1) % VOCAB_SIZE], [-1, -1, 1]
    forest = Proposal(
        "a", np.array(nodes, dtype=np.int32), np.array(parents, dtype=np.int32),
        np.zeros(3, dtype=np.float32),
    )  # fmt: skip
    candidates = candidates_of("rejection", merge([forest], 9, 9), [forest], 9)
    rows = request.tree([TOKENS[9], *nodes], [-1, *(parent + 1 for parent in parents)], 9)
    step = make_step([rows])
    output = run(
        llama.stages[0], replace(step, verification=Verification((candidates,), (7,), (9,)))
    )
    assert output.verification_results == (VerificationResult([1], then),)
    assert output.target_tokens[[0, 2]].tolist() == [best, then]
    assert run(llama.stages[0], step).verification_results is None


def test_a_step_that_asks_for_nothing(llama: Target) -> None:
    llama.clear()
    step = make_step([PagedRequest([1, 2, 3]).chunk(TOKENS[:9], 0)], logits_rows=[])
    output = run(llama.stages[0], step)
    assert len(output.target_tokens) == 0
    assert output.log_probs.scores is None
    assert output.probe_ids is None


def test_a_step_of_moves_only(llama: Target) -> None:
    llama.clear()
    request = PagedRequest([1, 2, 3])
    llama.logits([request.chunk(TOKENS[:9], 0)])
    stage = llama.stages[0]
    before = stage.kv.data.clone()
    output = run(stage, make_step([], moves=[(4, 9), (9, 4)]))
    assert len(output.target_tokens) == 0
    torch.testing.assert_close(stage.kv.data[:, [9, 4]], before[:, [4, 9]], rtol=0, atol=0)


def test_positions_beyond_the_rotary_table_grow_it(llama: Target) -> None:
    stage = load_stage(llama.folder, LayerSpan(0, 4, 4), 100, BLOCK_SIZE)
    tokens = (TOKENS * 6)[:300]
    request = PagedRequest(range(100))
    run(stage, make_step([request.chunk(tokens[:250], 0)]))
    ours = stage.logits(make_step([request.chunk(tokens[250:], 250)]), None, np.arange(50))
    assert_same(ours.numpy(), llama.expected(*tokens)[250:])


def test_kv_of_others_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    """Requests of unlike lengths are padded to one shape; nothing of the padding is another's."""
    stage = load_stage(
        save_tiny_model("llama", tmp_path), LayerSpan(0, 4, 4), NUM_BLOCKS, BLOCK_SIZE
    )
    requests = [PagedRequest([5, 6, 7, 8, 9, 10]), PagedRequest([15, 16, 17, 18, 19, 20])]
    chunks = [request.chunk(TOKENS[: 9 + 4 * i], 0) for i, request in enumerate(requests)]
    step = make_step(chunks)
    rows = np.arange(len(step.token_ids))
    expected = stage.logits(step, None, rows)
    stage.reset()
    own = np.concatenate([np.array(request.blocks) for request in requests])
    others = np.setdiff1d(np.arange(NUM_BLOCKS), own)
    slots = (others[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel()
    stage.kv.data[:, slots] = torch.nan
    assert torch.equal(stage.logits(step, None, rows), expected)
