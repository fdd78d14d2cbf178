"""Which requests are sent when, drawn from a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from ....deploy.cli.demo.held_out_prompts import held_out_prompts

TENANTS = ("amber", "birch", "cedar", "dune")
PROMPTS = 24
# Letters of a prompt, at its end.
PROMPT_LETTERS = (60, 700)
TOKENS = (48, 120, 240)
# Bodies that requests are drawn from: prompts come again, and prefixes with them.
BODIES_PER_REQUEST = 0.4
CHAT_SHARE = 0.25
STREAM_SHARE = 0.75
LEAVING_SHARE = 0.1
LEAVES_AFTER_S = (0.05, 1.5)
# So many requests come shortly before a fault, so that it meets some that run.
NEAR_FAULT_SHARE = 0.6
NEAR_FAULT_S = (0.1, 1.5)

WARM: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True}
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "ignore_eos": True}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": GREEDY,
    "sampled": WARM,
    "top_k": {**WARM, "top_k": 20, "min_p": 0.02},
    "penalties": {
        **WARM, "frequency_penalty": 0.4, "presence_penalty": 0.3, "repetition_penalty": 1.1,
    },
    "stop": {**GREEDY, "stop": ["return", "\n\n"]},
    "stop_warm": {**WARM, "stop": ["self", "):"], "min_tokens": 8},
    "logprobs": {**WARM, "logprobs": 3},
    "several": {**WARM, "n": 2},
    "bias": {**GREEDY, "logit_bias": {"10": -3.0, "265": 2.0}},
    "regex": {
        "temperature": 0.9,
        "structured_outputs": {"regex": "([a-z]{1,9} ){20,60}[a-z]{1,9}"},
    },
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    at_s           seconds from the start
    leaves_after_s when its client goes away, from its sending; None: it stays
    """

    tenant: str
    kind: str
    path: str
    body: Mapping[str, Any]
    at_s: float
    leaves_after_s: float | None


def make_plan(rng: Random, count: int, seconds: float, fault_times: Sequence[float]) -> list[Ask]:
    """`count` requests within `seconds`, in the order in which they are sent."""
    bodies = [_body(rng) for _ in range(max(round(count * BODIES_PER_REQUEST), 1))]
    asks = [_ask(rng, *rng.choice(bodies), _time(rng, seconds, fault_times)) for _ in range(count)]
    return sorted(asks, key=lambda ask: ask.at_s)


def _ask(rng: Random, kind: str, path: str, body: Mapping[str, Any], at_s: float) -> Ask:
    leaves = rng.random() < LEAVING_SHARE
    return Ask(
        tenant=rng.choice(TENANTS),
        kind=kind,
        path=path,
        body={**body, "stream": rng.random() < STREAM_SHARE},
        at_s=at_s,
        leaves_after_s=rng.uniform(*LEAVES_AFTER_S) if leaves else None,
    )


def _time(rng: Random, seconds: float, fault_times: Sequence[float]) -> float:
    if fault_times and rng.random() < NEAR_FAULT_SHARE:
        return max(rng.choice(fault_times) - rng.uniform(*NEAR_FAULT_S), 0.0)
    return rng.uniform(0.0, seconds)


def _body(rng: Random) -> tuple[str, str, Mapping[str, Any]]:
    """The kind, the path and the body of a request."""
    kind = rng.choice(list(KINDS))
    text = rng.choice(held_out_prompts(PROMPTS)).text
    text = text[-rng.randint(*PROMPT_LETTERS) :]
    body = {
        "model": "demo",
        "max_tokens": rng.choice(TOKENS),
        "seed": rng.randrange(1 << 30),
        "return_token_ids": True,
        **KINDS[kind],
    }
    if rng.random() >= CHAT_SHARE:
        return kind, "/v1/completions", body | {"prompt": text}
    if "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    messages = [{"role": "user", "content": text}]
    return kind, "/v1/chat/completions", body | {"messages": messages}
