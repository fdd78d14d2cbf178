"""A model drafter with the target's own weights draws what the target decodes, however shaped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline.core.proposals import Commit, DraftRequest, LogitsParams, Proposal, Query
from draftline.core.request.allowed_tokens import allowed_tokens_of
from draftline.core.request.request import Request, RequestState, RequestStats
from draftline.core.request.sampling_params import SamplingParams
from draftline.core.request.stop import StopRule, stop_token_ids
from draftline.core.sampling import build_edits, choose_tokens, edit_logits, sampling_rows
from draftline.core.tree.tree import NO_TREE
from draftline.drafters.model.drafter import ModelDrafter, load_model_drafter
from draftline.drafters.model.options import ModelOptions
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from transformers import AutoModelForCausalLM, PreTrainedModel

SEED = 21
EOS = 1
PROMPT = [(7 * k) % VOCAB_SIZE for k in range(21)]
NUM_TOKENS = 24

SHAPINGS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.4},
    "min_p": {"min_p": 0.3},
    "typical_p": {"typical_p": 0.3},
    "repetition": {"repetition_penalty": 1.5},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5},
    "negative frequency": {"frequency_penalty": -1.0},
    "bias": {"logit_bias": {3: 3.0, 40: 2.0, 41: -100.0}},
    "allowed": {"allowed_token_ids": tuple(range(5, 40))},
    "banned": {"banned_token_ids": tuple(range(0, VOCAB_SIZE, 3))},
    "min_tokens": {"min_tokens": 14, "stop_token_ids": tuple(range(48))},
    "all": {
        "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9,
        "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3,
        "logit_bias": {3: 1.0}, "banned_token_ids": (7, 8), "allowed_token_ids": tuple(range(80)),
        "min_tokens": 9, "stop_token_ids": (20, 21),
    },
}  # fmt: skip
FILTERS = ("top_k", "top_p", "min_p", "typical_p")
CASES = [(0.0, name) for name in SHAPINGS if name not in FILTERS] + [(1.0, n) for n in SHAPINGS]


class NoText:
    """No token has text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def state_of(params: SamplingParams) -> RequestState:
    rules = allowed_tokens_of(params, stop_token_ids(params, (EOS,)), VOCAB_SIZE)
    prompt = np.array(PROMPT, dtype=np.int32)
    request = Request("r", prompt, params, SEED, 99, lambda _: None, allowed_tokens=rules)
    return RequestState(
        request, StopRule(params, (EOS,), 99, NoText()), RequestStats(arrival_time=0.0)
    )


@torch.inference_mode()
def decode_plainly(target: PreTrainedModel, params: SamplingParams) -> list[int]:
    """The answer by transformers' whole forward passes and the reference of every parameter."""
    state = state_of(params)
    for _ in range(NUM_TOKENS):
        logits = target(torch.tensor([state.token_ids])).logits[0, -1:].numpy()
        edits = build_edits(state, NO_TREE, 0)
        position = np.array([len(state.token_ids)])
        state.append(
            choose_tokens(
                edit_logits(logits, () if edits is None else (edits,)),
                sampling_rows([params.temperature], [params], [SEED], position),
            ).tolist()
        )
    return state.token_ids[len(PROMPT) :]


def propose(drafter: ModelDrafter, text_len: int) -> Proposal:
    [proposal] = drafter.propose([Query("r", text_len, 4)])
    return proposal


@pytest.mark.parametrize(("temperature", "name"), CASES)
def test_every_drafted_token_is_the_target_s(
    checkpoint: Path, target: PreTrainedModel, temperature: float, name: str
) -> None:
    params = SamplingParams(temperature=temperature, **SHAPINGS[name])
    answer = decode_plainly(target, params)
    # Else the case could not tell whether the drafter minds its parameters.
    assert answer != decode_plainly(target, SamplingParams(temperature=temperature))
    state = state_of(params)
    drafter = load_model_drafter(checkpoint, options=ModelOptions(device="cpu", prefill_chunk=8))
    drafter.open(state.draft_request())
    # Whole chains with a bonus token, and parts of a chain, whose rest must leave no trace.
    for count in (5, 1, 2, 5, 3):
        done = state.num_answered
        assert propose(drafter, len(state.token_ids)).tokens.tolist() == answer[done : done + 4]
        added = answer[done : done + count]
        drafter.observe([Commit("r", len(state.token_ids), np.array(added, dtype=np.int32))])
        state.append(added)
    chain = propose(drafter, len(state.token_ids)).tokens.tolist()
    assert chain == answer[state.num_answered : state.num_answered + 4]
    # A drafter that was lost learns the same from the text so far.
    drafter.open(state.draft_request())
    assert propose(drafter, len(state.token_ids)).tokens.tolist() == chain


def test_requests_of_one_batch_keep_their_own_parameters(checkpoint: Path) -> None:
    shaped = [
        LogitsParams(logit_bias={23: -9.0}), LogitsParams(),
        LogitsParams(presence_penalty=2.0, top_k=4),
        LogitsParams(allowed_token_ids=(5, 6, 7)), LogitsParams(banned_token_ids=(95,)),
    ]  # fmt: skip
    prompt = np.array(PROMPT, dtype=np.int32)
    requests = [
        DraftRequest(str(index), prompt, 10, 1.0, SEED, logits_params=logits_params)
        for index, logits_params in enumerate(shaped)
    ]
    queries = [Query(request.request_id, len(PROMPT), 4) for request in requests]
    # Some draw while prompts of others are fed, so that rows are not requests.
    together = load_model_drafter(checkpoint, options=ModelOptions(device="cpu", prefill_chunk=30))
    for request in requests:
        together.open(request)
    chains = [proposal.tokens.tolist() for proposal in together.propose(queries)]
    assert len({tuple(chain) for chain in chains}) == len(shaped), chains
    for request, query, chain in zip(requests, queries, chains, strict=True):
        alone = load_model_drafter(checkpoint)
        alone.open(request)
        assert alone.propose([query])[0].tokens.tolist() == chain


def chain_of(checkpoint: Path, logits_params: LogitsParams) -> list[int]:
    drafter = load_model_drafter(checkpoint)
    prompt = np.array(PROMPT, dtype=np.int32)
    drafter.open(DraftRequest("r", prompt, 21, 1.0, SEED, logits_params=logits_params))
    return propose(drafter, len(PROMPT)).tokens.tolist()


def test_tokens_that_only_the_target_has_change_nothing(checkpoint: Path) -> None:
    mine = LogitsParams(logit_bias={3: 3.0}, banned_token_ids=(5,))
    more = LogitsParams(logit_bias={3: 3.0, VOCAB_SIZE: 9.0}, banned_token_ids=(5, VOCAB_SIZE + 40))
    assert chain_of(checkpoint, more) == chain_of(checkpoint, mine)


def test_where_the_drafter_has_no_token_to_choose_it_says_nothing(checkpoint: Path) -> None:
    assert chain_of(checkpoint, LogitsParams(allowed_token_ids=(VOCAB_SIZE, 10_000))) == []
