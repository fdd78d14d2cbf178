"""Drafters of kinds that run by transformers' own forward, on tiny random checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline.core.errors import CheckpointError, ConfigError
from draftline.core.proposals import Commit, DraftRequest, Proposal, Query
from draftline.core.sampling import gumbel
from draftline.drafters.model.drafter import ModelDrafter, load_model_drafter
from draftline.drafters.model.options import ModelOptions
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    OPTConfig,
    PhiConfig,
)

VOCAB, SEED = 61, 21
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=1,
    ),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES),
    "phi": lambda: PhiConfig(**SIZES),
    "opt": lambda: OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32),
}
TREES = ("gpt2", "gpt_neox", "phi")


def saved(config: Any, folder: Path) -> Path:
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(CONFIGS[request.param](), tmp_path_factory.mktemp(request.param))


def drafter_of(folder: Path | str, **options: Any) -> ModelDrafter:
    return load_model_drafter(
        folder, options=ModelOptions(device="cpu", block_size=4, num_blocks=64, **options)
    )


def proposed(
    drafter: ModelDrafter, name: str, text: list[int], temperature: float = 0.0
) -> Proposal:
    ids = np.array(text, dtype=np.int32)
    drafter.open(DraftRequest(name, ids, len(ids), temperature, SEED))
    return drafter.propose([Query(name, len(ids), 16)])[0]


def chain_of(model: Any, text: list[int], count: int, temperature: float) -> list[int]:
    """The chain with shared noise by whole forward passes."""
    drawn: list[int] = []
    for _ in range(count):
        with torch.inference_mode():
            logits = model(torch.tensor([text + drawn])).logits[0, -1].numpy()
        if temperature > 0:
            position = np.full(1, len(text) + len(drawn))
            noise = gumbel(np.full(1, SEED), position, np.arange(VOCAB))
            logits = logits / temperature + noise
        drawn.append(int(np.argmax(logits)))
    return drawn


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_chains_are_those_of_whole_passes(other: Path, temperature: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32).eval()
    drafter = drafter_of(other, prefill_chunk=7)
    texts = {"r": [(3 * k) % VOCAB for k in range(19)], "s": [(3 * k) % VOCAB for k in range(14)]}
    for name, text in texts.items():
        draft = proposed(drafter, name, text, temperature)
        assert draft.tokens.tolist() == chain_of(model, text, 4, temperature)
    # The second shares what the first has computed, and both go on from what they keep.
    assert drafter.prefix_counts.hits == 12
    for name, text in list(texts.items()):
        accepted = chain_of(model, text, 2, temperature)
        tokens = [*accepted, 7]
        drafter.observe([Commit(name, len(text), np.array(tokens, dtype=np.int32))])
        texts[name] = [*text, *tokens]
    queries = [Query(name, len(text), 16) for name, text in texts.items()]
    for draft, text in zip(drafter.propose(queries), texts.values(), strict=True):
        assert draft.tokens.tolist() == chain_of(model, text, 4, temperature)


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_trees_hold_the_model_s_own_chain(kind: str, temperature: float, tmp_path: Path) -> None:
    folder = saved(CONFIGS[kind](), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    drafter = drafter_of(folder, tree="dynamic", num_tokens=3, top_k=3)
    text = [(5 * k) % VOCAB for k in range(17)]
    draft = proposed(drafter, "r", text, temperature)
    nodes = list(zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True))
    assert len(nodes) > 8
    at = -1
    for token in chain_of(model, text, 3, temperature):
        at = nodes.index((token, at))
    if temperature:
        return
    for node in range(len(nodes)):
        path = path_of(node, nodes)
        with torch.inference_mode():
            logits = model(torch.tensor([[*text, *path[:-1]]])).logits[0, -1]
        expected = torch.log_softmax(logits, -1)[path[-1]].item()
        assert draft.log_probs[node] == pytest.approx(expected, abs=1e-4)


def path_of(node: int, nodes: list[tuple[int, int]]) -> list[int]:
    """Tokens from the root to a node."""
    token, parent = nodes[node]
    return [token] if parent == -1 else [*path_of(parent, nodes), token]


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, seq_length=64),
        MambaConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, max_position_embeddings=64
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_what_has_attention_or_states_of_its_own_is_refused(config: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"'{config.model_type}'"):
        drafter_of(saved(config, tmp_path))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi"])
def test_rounded_weights_draft_about_the_same(kind: str, tmp_path: Path) -> None:
    folder = "demo-drafter" if kind == "llama" else saved(CONFIGS[kind](), tmp_path)
    text = [(3 * k) % VOCAB for k in range(12)]
    plain, rounded = (
        proposed(drafter_of(folder, weights=one), "r", text) for one in ("auto", "int8")
    )
    assert len(rounded.tokens) == 4
    assert rounded.log_probs[0] != plain.log_probs[0]
    assert rounded.tokens[0] == plain.tokens[0]
    assert rounded.log_probs[0] == pytest.approx(plain.log_probs[0], abs=0.1)


def test_what_cannot_be_rounded_so_is_named() -> None:
    with pytest.raises(ConfigError, match="weights"):
        ModelOptions(weights="int2")


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SIZES | {"hidden_size": 24, "intermediate_size": 40}),
        OPTConfig(**SIZES | {"hidden_size": 24}, ffn_dim=40, word_embed_proj_dim=24),
    ],
    ids=["own layers", "other layers"],
)
def test_layers_of_any_size_can_be_rounded(config: Any, tmp_path: Path) -> None:
    assert drafter_of(saved(config, tmp_path), weights="int8")
