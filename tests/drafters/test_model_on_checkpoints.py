"""The model drafter on real (tiny, random) checkpoints, against transformers' own forward."""

from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.errors import CheckpointError
from draftline.core.noise import gumbel
from draftline.core.types import Commit, DraftRequest, Query
from draftline.drafters.model import ModelOptions, load_model_drafter
from support.tiny_models import VOCAB_SIZE, save_tiny_model
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
        law = torch.log_softmax(logits, dim=-1).numpy()
        scores = law
        if temperature > 0:
            position = np.full(1, len(text) + len(drawn))
            noise = gumbel(np.full(1, SEED), position, np.arange(VOCAB_SIZE))
            scores = logits.numpy() / temperature + noise
        drawn.append(int(np.argmax(scores)))
        log_probs.append(float(law[drawn[-1]]))
    return drawn, log_probs


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chains_equal_transformers(
    checkpoint: Path, whole_model: PreTrainedModel, temperature: float
) -> None:
    drafter = load_model_drafter(checkpoint, "small", ModelOptions(prefill_chunk=8, branch=1))
    text = [(7 * k) % VOCAB_SIZE for k in range(21)]
    drafter.open(DraftRequest("r", np.array(text, dtype=np.int32), 21, temperature, SEED))
    for accepted in (4, 1, 0):
        expected, log_probs = draw_by_transformers(whole_model, text, 4, temperature)
        [proposal] = drafter.propose([Query("r", len(text), 8)])
        proposal.check(VOCAB_SIZE)
        assert proposal.source == "small"
        assert proposal.tokens[:4].tolist() == expected
        np.testing.assert_allclose(proposal.log_probs[:4], log_probs, atol=1e-4)
        assert len(proposal.tokens) == (5 if temperature == 0 else 4)
        bonus = (expected[accepted] + 1) % VOCAB_SIZE if accepted < 4 else 2
        tokens = [*expected[:accepted], bonus]
        drafter.observe([Commit("r", len(text), np.array(tokens, dtype=np.int32))])
        text += tokens


def test_chunks_of_the_prompt_do_not_change_the_chain(checkpoint: Path) -> None:
    text = list(range(10))
    chains: list[list[int]] = []
    for chunk in (256, 3):
        drafter = load_model_drafter(checkpoint, options=ModelOptions(prefill_chunk=chunk))
        drafter.open(DraftRequest("r", np.array(text, dtype=np.int32), 10, 1.0, SEED))
        chains.append(drafter.propose([Query("r", 10, 4)])[0].tokens.tolist())
    assert len(chains[0]) == 4
    assert chains[0] == chains[1]


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        load_model_drafter(tmp_path / "nowhere")
