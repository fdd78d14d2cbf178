"""The model drafter on real (tiny, random) checkpoints, against transformers' own forward."""

from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.arrays import ROOT
from draftline.core.errors import CheckpointError
from draftline.core.proposals import Commit, DraftRequest, LogitsParams, Proposal, Query
from draftline.core.sampling import gumbel
from draftline.drafters.model import drafter as model
from draftline.drafters.model.drafter import load_model_drafter
from draftline.drafters.model.expansion import DynamicExpansion
from draftline.drafters.model.options import ModelOptions
from draftline.models.load.partition import LayerSpan
from draftline.models.stage.gpu_path import GraphOptions
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from draftline.models.stage.stage import Stage
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

SEED = 21


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def whole_model(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def draw_by_transformers(
    model: PreTrainedModel, text: list[int], num_tokens: int, temperature: float
) -> tuple[list[int], list[float]]:
    """The chain with shared noise by whole forward passes, and its log-probabilities."""
    drawn: list[int] = []
    log_probs: list[float] = []
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = model(torch.tensor([text + drawn])).logits[0, -1]
        distribution = torch.log_softmax(logits, dim=-1).numpy()
        scores = distribution
        if temperature > 0:
            position = np.full(1, len(text) + len(drawn))
            noise = gumbel(np.full(1, SEED), position, np.arange(VOCAB_SIZE))
            scores = logits.numpy() / temperature + noise
        drawn.append(int(np.argmax(scores)))
        log_probs.append(float(distribution[drawn[-1]]))
    return drawn, log_probs


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chains_equal_transformers(
    checkpoint: Path, whole_model: PreTrainedModel, temperature: float, device: str
) -> None:
    options = ModelOptions(device=device, dtype="float32", prefill_chunk=8)
    drafter = load_model_drafter(checkpoint, "small", options)
    text = [(7 * k) % VOCAB_SIZE for k in range(21)]
    drafter.open(DraftRequest("r", np.array(text, dtype=np.int32), 21, temperature, SEED))
    for accepted in (4, 1, 0):
        expected, log_probs = draw_by_transformers(whole_model, text, 4, temperature)
        [proposal] = drafter.propose([Query("r", len(text), 8)])
        proposal.check(VOCAB_SIZE)
        assert proposal.source == "small"
        assert proposal.tokens[:4].tolist() == expected
        # GPUs may multiply with TF32.
        bound = 1e-4 if device == "cpu" else 1e-2
        np.testing.assert_allclose(proposal.log_probs[:4], log_probs, atol=bound)
        assert len(proposal.tokens) == 4
        bonus = (expected[accepted] + 1) % VOCAB_SIZE if accepted < 4 else 2
        tokens = [*expected[:accepted], bonus]
        drafter.observe([Commit("r", len(text), np.array(tokens, dtype=np.int32))])
        text += tokens


def distribution_after(model: PreTrainedModel, text: list[int]) -> np.ndarray:
    with torch.inference_mode():
        logits = model(torch.tensor([text])).logits[0, -1]
    return torch.log_softmax(logits, dim=-1).numpy()


def paths_of(proposal: Proposal) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent != ROOT else ()), token))
    return paths


def test_a_dynamic_tree_is_eagle_2_s_by_whole_passes(
    checkpoint: Path, whole_model: PreTrainedModel
) -> None:
    options = ModelOptions(device="cpu", tree="dynamic", top_k=3, num_tokens=3, block_size=4)
    drafter = load_model_drafter(checkpoint, "small", options)
    text = [(5 * k) % VOCAB_SIZE for k in range(13)]
    drafter.open(DraftRequest("r", np.array(text, dtype=np.int32), 13, 0.0, SEED))
    for committed in ([4], [2, 9, 30], [1]):
        [proposal] = drafter.propose([Query("r", len(text), 8)])
        proposal.check(VOCAB_SIZE)
        expansion = DynamicExpansion(top_k=3, depth=3, max_nodes=8)
        paths: dict[int, list[int]] = {ROOT: []}
        while expansion.frontier:
            distributions = [
                distribution_after(whole_model, text + paths[node]) for node in expansion.frontier
            ]
            ids = [
                np.argsort(-distribution, kind="stable")[:3].tolist()
                for distribution in distributions
            ]
            expansion.grow(
                ids,
                [
                    distribution[own].tolist()
                    for distribution, own in zip(distributions, ids, strict=True)
                ],
            )
            for node in expansion.frontier:
                parent = expansion.parents[node]
                paths[node] = [*paths[parent], expansion.tokens[node]]
        tokens, parents, log_probs = expansion.best(8)
        assert paths_of(proposal) == paths_of(Proposal("", tokens, parents, log_probs))
        np.testing.assert_allclose(proposal.log_probs, log_probs, atol=1e-4)
        drafter.observe([Commit("r", len(text), np.array(committed, dtype=np.int32))])
        text += committed


@pytest.mark.parametrize("temperature", [0.0, 0.8, 2.0])
@pytest.mark.parametrize(("tree", "depth"), [("dynamic", 2), ("file", 4)])
def test_trees_hold_what_the_model_itself_would_say(
    checkpoint: Path,
    whole_model: PreTrainedModel,
    tmp_path: Path,
    temperature: float,
    tree: str,
    depth: int,
) -> None:
    """So a drafter that equals the target is right wherever the tree is full."""
    if tree == "file":
        tree = str(tmp_path / "tree.json")
        Path(tree).write_text("[[0], [0, 0], [0, 1], [0, 0, 0], [1], [0, 0, 0, 0]]")
    drafter = load_model_drafter(
        checkpoint, options=ModelOptions(device="cpu", tree=tree, num_tokens=depth, block_size=4)
    )
    for name, seed in (("r", SEED), ("s", 4)):
        text = [(3 * k + seed) % VOCAB_SIZE for k in range(9)]
        drafter.open(DraftRequest(name, np.array(text, dtype=np.int32), 9, temperature, seed))
    proposals = drafter.propose([Query("r", 9, 30), Query("s", 9, 30)])
    text = [(3 * k + SEED) % VOCAB_SIZE for k in range(9)]
    chain, _ = draw_by_transformers(whole_model, text, depth, temperature)
    assert {tuple(chain[: length + 1]) for length in range(depth)} <= set(paths_of(proposals[0]))
    assert len(proposals[1].tokens) > 4


def test_a_shaped_distribution_gets_a_chain(checkpoint: Path) -> None:
    drafter = load_model_drafter(checkpoint, options=ModelOptions(device="cpu", tree="dynamic"))
    logits_params = LogitsParams(repetition_penalty=1.5)
    text = np.arange(9, dtype=np.int32)
    drafter.open(DraftRequest("r", text, 9, 0.0, SEED, logits_params=logits_params))
    [proposal] = drafter.propose([Query("r", 9, 30)])
    assert proposal.parents.tolist() == [-1, 0, 1, 2]


def test_chunks_of_the_prompt_do_not_change_the_chain(checkpoint: Path) -> None:
    text = list(range(10))
    chains: list[list[int]] = []
    for chunk in (256, 3):
        drafter = load_model_drafter(
            checkpoint, options=ModelOptions(device="cpu", prefill_chunk=chunk)
        )
        drafter.open(DraftRequest("r", np.array(text, dtype=np.int32), 10, 1.0, SEED))
        chains.append(drafter.propose([Query("r", 10, 4)])[0].tokens.tolist())
    assert len(chains[0]) == 4
    assert chains[0] == chains[1]


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        load_model_drafter(tmp_path / "nowhere")


def test_a_gpu_runs_the_passes_as_graphs(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    def load(
        path: Path, span: object, num_blocks: int, block_size: int,
        *, dtype: str, device: str, options: StageOptions,
    ) -> Stage:  # fmt: skip
        asked.append((dtype, device, options.graphs))
        return load_stage(path, LayerSpan(0, 4, 4), num_blocks, block_size)

    monkeypatch.setattr(model, "load_stage", load)
    monkeypatch.setattr(model, "choose_device", lambda setting: "cuda")
    load_model_drafter(checkpoint, options=ModelOptions(prefill_chunk=32, num_blocks=4))
    load_model_drafter(checkpoint, options=ModelOptions(enforce_eager=True, dtype="float16"))
    graphs = GraphOptions(max_rows=32, max_requests=32, max_positions=64, seconds=model.CAPTURE_S)
    assert asked == [("bfloat16", "cuda", graphs), ("float16", "cuda", None)]
