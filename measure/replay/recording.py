"""A target's answers in a file, so that drafters can be measured without the target."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from ...core.errors import ConfigError
from ...core.request.output import RequestOutput
from ...core.request.sampling_params import SamplingParams
from ...core.steps import StepInput
from ...core.tree.tree import unpack
from ..runs.matched import Plan

FIELD = "replay"
VERSION = 2
# Next tokens that are kept for each token of an answer: the most that drafters which learn from the
# target's predictions request.
NUM_TOP_NEXT_TOKENS = 8
_SETTINGS = ("model", "max_tokens", "temperature", "ignore_eos")
_ANSWER = ("name", "prompt", "seed", "prompt_ids", "answer_ids", "top_next_tokens", "off_text")


class OffText(NamedTuple):
    """The target's most probable tokens, best first, after a text that it did not generate.

    start   length of the answer's own text before `tokens`
    tokens  tokens after it, the first of which differs from the answer's
    ids     the most probable next tokens
    """

    start: int
    tokens: tuple[int, ...]
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAnswer:
    """One answer of the target alone.

    seed             of its sampling; no two answers of a recording share one
    top_next_tokens  the target's most probable tokens, best first, at the place of each answer
                     token
    off_text         the same after other tokens, as requested by drafters
    """

    name: str
    prompt: str
    seed: int
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    top_next_tokens: tuple[tuple[int, ...], ...]
    off_text: tuple[OffText, ...] = ()

    @property
    def text_ids(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return self.prompt_ids + self.answer_ids

    @classmethod
    def of(cls, name: str, prompt: str, seed: int, output: RequestOutput) -> Self:
        """The recorded answer of a request that was made with `recorded_params`."""
        return cls(
            name=name,
            prompt=prompt,
            seed=seed,
            prompt_ids=output.prompt_token_ids,
            answer_ids=output.token_ids,
            top_next_tokens=tuple(token.top_ids for token in output.log_probs),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The answers of one model to one plan; the fields are those of `Plan`."""

    model: str
    max_tokens: int
    temperature: float
    ignore_eos: bool
    answers: tuple[RecordedAnswer, ...]

    def with_probed(self, probed: ProbedTokens) -> Recording:
        """A copy with the matching predictions of the target that drafters requested."""
        off_texts: dict[int, list[OffText]] = {answer.seed: [] for answer in self.answers}
        texts = {answer.seed: answer.text_ids for answer in self.answers}
        for context, ids in probed.items():
            if context.seed in texts:
                start, tokens = off_text(texts[context.seed], context.start, context.tokens)
                if tokens:
                    off_texts[context.seed].append(OffText(start, tokens, ids))
        answers = (
            replace(answer, off_text=tuple(off_texts[answer.seed])) for answer in self.answers
        )
        return replace(self, answers=tuple(answers))

    def write(self, path: Path) -> None:
        """Write one JSON line with the settings, then one for each answer."""
        path.parent.mkdir(parents=True, exist_ok=True)
        head = {name: getattr(self, name) for name in _SETTINGS}
        lines = [{"version": VERSION} | head, *(_fields(answer) for answer in self.answers)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        path.write_text(text, encoding="utf-8")


def off_text(
    text: Sequence[int], start: int, tokens: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    """The position from which `tokens`, placed at `start`, differ from `text`, and the rest.

    No tokens if `text` contains them all.
    """
    for position, token in enumerate(tokens, start):
        if position >= len(text) or text[position] != token:
            return position, tokens[position - start :]
    return start + len(tokens), ()


def read_recording(path: Path) -> Recording:
    """Read what `Recording.write` wrote. Raises `ConfigError` naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(FIELD, f"cannot read {path}: {error}") from error
    recording = Recording(**_head(path, lines), answers=tuple(_answers(path, lines)))
    if not recording.answers or len({answer.seed for answer in recording.answers}) < len(
        recording.answers
    ):
        raise ConfigError(FIELD, f"{path} holds no answers, or two of one seed")
    return recording


def recorded_params(plan: Plan, index: int) -> SamplingParams:
    """Sampling parameters with which prompt `index` of a plan is recorded."""
    return SamplingParams(
        max_tokens=plan.max_tokens,
        temperature=plan.temperature,
        seed=plan.seed + index,
        ignore_eos=plan.ignore_eos,
        logprobs=NUM_TOP_NEXT_TOKENS,
    )


def _head(path: Path, lines: Sequence[str]) -> dict[str, Any]:
    try:
        head = json.loads(lines[0])
        if head.pop("version") != VERSION:
            raise ValueError("another version wrote it")
        return {name: head[name] for name in _SETTINGS}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(FIELD, f"{path} is no recording of draftline bench: {error}") from error


def _answers(path: Path, lines: Sequence[str]) -> Iterator[RecordedAnswer]:
    for number, line in enumerate(lines[1:], 2):
        try:
            yield _answer(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            message = f"{path} line {number} is no recorded answer: {error}"
            raise ConfigError(FIELD, message) from error


def _fields(answer: RecordedAnswer) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in _ANSWER}


def _answer(row: dict[str, Any]) -> RecordedAnswer:
    answer = RecordedAnswer(
        name=str(row["name"]),
        prompt=str(row["prompt"]),
        seed=int(row["seed"]),
        prompt_ids=_ids(row["prompt_ids"]),
        answer_ids=_ids(row["answer_ids"]),
        top_next_tokens=tuple(map(_ids, row["top_next_tokens"])),
        off_text=tuple(
            OffText(int(start), _ids(tokens), _ids(ids)) for start, tokens, ids in row["off_text"]
        ),
    )
    if len(answer.top_next_tokens) != len(answer.answer_ids) or not answer.prompt_ids:
        raise ValueError("a list is too short")
    return answer


def _ids(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(map(int, values))


class RowContext(NamedTuple):
    """The text that a row follows: its request's text before `start`, then `tokens`.

    The last token is the row's own. `seed` identifies the request.
    """

    seed: int
    start: int
    tokens: tuple[int, ...]


# The target's most probable next tokens, best first.
ProbedTokens = dict[RowContext, tuple[int, ...]]


def probed_contexts(step: StepInput) -> Iterator[RowContext]:
    """Contexts of the step's `probe_rows`, in order.

    A node follows the root and its ancestors; a row of a pool also sees one token at each position.
    """
    owners = np.searchsorted(step.request_starts, step.probes.rows, side="right") - 1
    firsts = step.request_starts[owners]
    # A request with probe rows has a root, which gets a target token.
    seeds = step.sampling.seed[np.searchsorted(step.logits_rows, firsts)]
    rows = zip(
        seeds.tolist(), owners.tolist(), firsts.tolist(), step.probes.rows.tolist(), strict=True
    )
    for seed, owner, first, row in rows:
        tree = step.trees[owner]
        assert tree is not None
        visible = unpack(tree.ancestors[row - first : row - first + 1], len(tree.slots))
        seen = first + np.flatnonzero(visible[0])
        start = int(step.positions[first])
        assert np.array_equal(step.positions[seen], np.arange(start, start + len(seen)))
        yield RowContext(seed, start, tuple(step.token_ids[seen].tolist()))
