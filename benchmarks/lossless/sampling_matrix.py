"""Whether speculation changes a token under any sampling parameter: each alone and some together.

    python -m draftline.benchmarks.lossless.sampling_matrix [--prompts 8] [--output FILE]

Every cell decodes the same prompts with one set of parameters, by each drafter and by all, and
compares tokens and log-probabilities with plain decoding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer

from ...cluster.config import EngineConfig
from ...cluster.engine.assembly import plan_model
from ...core.request.allowed_tokens import StructuredOutput
from ...core.request.output import RequestOutput
from ...core.request.sampling_params import RequestOptions, SamplingParams
from ...deploy.cli.demo.prompts import held_out_prompts
from ...deploy.engine.engine import Engine
from ...measure.runs.near_tie import Judge, Parting
from ..peers.transformers_peer import TransformersPeer
from .matrix import DRAFTERS, MIXES

RESULT = Path(__file__).parents[1] / "results" / "sampling_matrix.json"
PLAIN = RequestOptions(speculative=False)
# Two shapes of a batch round a sum of thousands of terms differently.
LOG_PROB_TOLERANCE = 1e-3
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 4},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}


def _form(kind: str, value: str) -> dict[str, StructuredOutput]:
    return {"structured_output": StructuredOutput(kind=kind, value=value)}  # type: ignore[arg-type]


GREEDY = {"temperature": 0.0}
WARM = {"temperature": 0.8, "seed": 5}
PARAMETERS: dict[str, Mapping[str, object]] = {
    "temperature 0": GREEDY,
    "temperature 0.8": WARM,
    "top_k": {**WARM, "top_k": 20},
    "top_p": {**WARM, "top_p": 0.8},
    "min_p": {**WARM, "min_p": 0.1},
    "typical_p": {**WARM, "typical_p": 0.6},
    "repetition_penalty": {**GREEDY, "repetition_penalty": 1.3},
    "presence_penalty": {**WARM, "presence_penalty": 1.2},
    "frequency_penalty": {**GREEDY, "frequency_penalty": 0.6},
    "logit_bias": {**WARM, "logit_bias": {10: 4.0, 265: -100.0, 11: 2.5}},
    "allowed_token_ids": {**WARM, "allowed_token_ids": tuple(range(5, 1500))},
    "banned_token_ids": {**GREEDY, "banned_token_ids": tuple(range(200, 420))},
    "stop": {**GREEDY, "stop": ("\n\n", "return")},
    "stop_token_ids": {**WARM, "stop_token_ids": (265,), "ignore_eos": False},
    "min_tokens": {**GREEDY, "min_tokens": 20, "stop_token_ids": tuple(range(200, 400))},
    "logprobs": {**WARM, "logprobs": 5, "prompt_logprobs": 3},
    "json schema": {**WARM, **_form("json", json.dumps(SCHEMA)), "ignore_eos": False},
    "json object": {**GREEDY, **_form("json_object", ""), "ignore_eos": False},
    "regex": {**WARM, **_form("regex", r"[a-z_]{3,12}\([a-z]+(, [a-z]+)*\)"), "ignore_eos": False},
    "choice": {**WARM, **_form("choice", '["yes", "no", "perhaps not"]'), "ignore_eos": False},
    "grammar": {
        **GREEDY,
        **_form("grammar", 'start: "[" item ("," item)* "]"\nitem: /[0-9]{1,3}/'),
        "ignore_eos": False,
    },
    "all together": {
        **WARM, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "typical_p": 0.95,
        "repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2,
        "logit_bias": {10: 1.0}, "banned_token_ids": (12, 300), "min_tokens": 8, "logprobs": 2,
    },
}  # fmt: skip
# One engine has all of their drafters.
COLUMNS = tuple(mix for mix, names in MIXES.items() if names and set(names) <= set(DRAFTERS))


@dataclass(frozen=True, slots=True)
class SamplingCell:
    """One set of parameters with one mix of drafters: tokens compared, drafted ones among them."""

    parameter: str
    mix: str
    tokens: int
    accepted: int
    near_ties: tuple[Parting, ...]
    faults: tuple[str, ...]

    def __str__(self) -> str:
        if self.faults:
            return f"**{len(self.faults)} differ**"
        ties = f", {len(self.near_ties)} near-ties" if self.near_ties else ""
        return f"equal ({self.accepted} of {self.tokens} drafted{ties})"


@dataclass(frozen=True, slots=True)
class Sheet:
    """All cells."""

    cells: tuple[SamplingCell, ...]

    @property
    def faults(self) -> list[str]:
        """Every difference that is not a near-tie; must be empty."""
        return [fault for cell in self.cells for fault in cell.faults]

    def table(self) -> str:
        """A row for each parameter and a column for each mix, in Markdown."""
        found = {(cell.parameter, cell.mix): cell for cell in self.cells}
        rows = [["parameter", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
        rows += [[name, *(str(found[name, mix]) for mix in COLUMNS)] for name in PARAMETERS]
        return "".join(f"| {' | '.join(row)} |\n" for row in rows)

    def record(self, prompts: int, tokens: int) -> dict[str, object]:
        """What a file keeps: the sizes, and of every cell how much was compared and differed."""
        return {
            "prompts": prompts,
            "tokens": tokens,
            "cells": [
                {
                    "parameter": cell.parameter,
                    "drafters": cell.mix,
                    "tokens": cell.tokens,
                    "drafted": cell.accepted,
                    "near_ties": len(cell.near_ties),
                    "faults": list(cell.faults),
                }
                for cell in self.cells
            ],
        }


def run_matrix(
    prompts: int,
    tokens: int,
    mixes: Sequence[str] = COLUMNS,
    parameters: Sequence[str] = tuple(PARAMETERS),
) -> Sheet:
    """All cells over the bundled model in one process."""
    torch.set_num_threads(1)
    texts = [prompt.text for prompt in held_out_prompts(prompts)]
    config = EngineConfig(
        model="demo",
        drafters=list(DRAFTERS.values()),
        max_num_seqs=prompts,
        # What does not pay or comes late on this machine is to be compared as well.
        node_budget="full",
        draft_deadline_ms=10_000,
    )
    target = TransformersPeer("demo").target
    judge = Judge(target, plan_model(config).request_factory())
    cells = []
    with Engine(config) as engine:
        for parameter in parameters:
            values = {"ignore_eos": True, **PARAMETERS[parameter]}
            params = SamplingParams(max_tokens=tokens, **values)  # type: ignore[arg-type]
            plain = engine.generate(texts, params, PLAIN)
            for mix in mixes:
                outputs = engine.generate(texts, params, RequestOptions(drafters=MIXES[mix]))
                cells.append(_compare(parameter, mix, plain, outputs, judge, params))
    return Sheet(tuple(cells))


def _compare(
    parameter: str,
    mix: str,
    plain: Sequence[RequestOutput],
    outputs: Sequence[RequestOutput],
    judge: Judge,
    params: SamplingParams,
) -> SamplingCell:
    partings = judge.partings(
        [out.prompt_token_ids for out in plain],
        [out.token_ids for out in plain],
        [out.token_ids for out in outputs],
        params,
    )
    parted = {parting.prompt for parting in partings}
    faults = [str(parting) for parting in partings if not parting.is_near_tie]
    for index, (a, b) in enumerate(zip(plain, outputs, strict=True)):
        if index not in parted and not _is_alike(a, b):
            faults.append(
                f"prompt {index}: the tokens are equal, texts or log-probabilities differ"
            )
    return SamplingCell(
        parameter=parameter,
        mix=mix,
        tokens=sum(len(out.token_ids) for out in outputs),
        accepted=sum(out.metrics.num_accepted_tokens for out in outputs),
        near_ties=tuple(parting for parting in partings if parting.is_near_tie),
        faults=tuple(f"{parameter}, {mix}: {fault}" for fault in faults),
    )


def _is_alike(a: RequestOutput, b: RequestOutput) -> bool:
    """Whether all but the tokens is equal, and log-probabilities up to rounding."""
    pairs = zip(_log_probs(a), _log_probs(b), strict=True)
    return (
        (a.text, a.finish_reason) == (b.text, b.finish_reason)
        and len(a.log_probs) == len(b.log_probs)
        and all(abs(one - other) < LOG_PROB_TOLERANCE for one, other in pairs)
    )


def _log_probs(output: RequestOutput) -> list[float]:
    """Log-probabilities of prompt, answer and most probable tokens, whose order may swap."""
    tokens = [*(output.prompt_log_probs or ()), *output.log_probs]
    return [
        value
        for token in tokens
        if token is not None
        for value in (token.log_prob, *token.top_log_probs)
    ]


def main(
    prompts: Annotated[int, typer.Option(help="Held-out prompts.")] = 8,
    tokens: Annotated[int, typer.Option(help="New tokens for each.")] = 48,
    output: Annotated[Path | None, typer.Option(help="JSON file that gets all cells.")] = None,
) -> None:
    """Run the matrix and print its table; exits 1 if anything but near-ties differs."""
    sheet = run_matrix(prompts, tokens)
    print(sheet.table())
    for fault in sheet.faults:
        print(f"DIFFERS: {fault}")
    if output is not None:
        output.write_text(json.dumps(sheet.record(prompts, tokens), indent=1) + "\n")
    raise typer.Exit(1 if sheet.faults else 0)


if __name__ == "__main__":
    typer.run(main)
