"""Answers of the demo model that are replayed, kept in a folder once they are recorded."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from ....cluster.config import EngineConfig
from ....core.request.sampling_params import RequestOptions
from ....deploy.cli.demo.held_out_prompts import held_out_prompts
from ....deploy.engine.engine import Engine
from ....measure.prompts.bench_prompt import BenchPrompt
from ....measure.prompts.files import read_prompts
from ....measure.replay.recording import (
    RecordedAnswer,
    Recording,
    read_recording,
    recorded_params,
)
from ....measure.runs.matched import Plan

MODEL = "demo"
MAX_TOKENS = 96
# Lines of a bundled prompt that a text which copies itself repeats, and how often.
COPIED_LINES, COPIES = 2, 6
# A token is copied if the text has it behind as many tokens as these before.
COPIED_CONTEXT = 4
# Answers of the copy-heavy set: those that copy most.
NUM_COPYING = 16
COPYING = "copy-heavy"
# Prompts longer than this leave no room for an answer.
MAX_PROMPT_TOKENS = 384


def recorded(folder: Path, name: str, temperature: float, file: Path | None) -> Recording:
    """The answers of a set of prompts: `bundled`, `copy-heavy`, or that of a file."""
    path = folder / f"{name}-t{temperature:g}.jsonl"
    if not path.exists():
        recording = _record(_prompts(name, file), temperature)
        if name == COPYING:
            answers = sorted(recording.answers, key=copied_share, reverse=True)[:NUM_COPYING]
            recording = _with(recording, answers)
        recording.write(path)
    return read_recording(path)


def copied_share(answer: RecordedAnswer) -> float:
    """Share of the answer's tokens that stand in the text before, behind the same tokens."""
    seen: dict[tuple[int, ...], int] = {}
    text, num_copied = answer.text_ids, 0
    first = len(answer.prompt_ids)
    for end in range(COPIED_CONTEXT, len(text)):
        context = text[end - COPIED_CONTEXT : end]
        if end >= first:
            num_copied += seen.get(context) == text[end]
        seen[context] = text[end]
    return num_copied / len(answer.answer_ids)


def _prompts(name: str, file: Path | None) -> list[BenchPrompt]:
    if file is not None:
        return read_prompts(file)
    bundled = [BenchPrompt(prompt.name, prompt.text) for prompt in held_out_prompts()]
    if name != COPYING:
        return bundled
    return [BenchPrompt(prompt.name, _repeated(prompt.text)) for prompt in bundled]


def _repeated(text: str) -> str:
    lines = [line for line in text.split("\n") if line.strip()]
    copied = "".join(f"{line}\n" for line in islice(cycle(lines), COPIED_LINES))
    return copied * COPIES


def _record(prompts: Sequence[BenchPrompt], temperature: float) -> Recording:
    plan = Plan(prompts=prompts, max_tokens=MAX_TOKENS, temperature=temperature)
    answers: list[RecordedAnswer] = []
    with Engine(EngineConfig(model=MODEL)) as engine:
        for index, prompt in enumerate(prompts):
            if len(engine.tokenizer.encode(prompt.text)) > MAX_PROMPT_TOKENS:
                continue
            params = recorded_params(plan, index)
            assert params.seed is not None
            [output] = engine.generate([prompt.text], params, RequestOptions(speculative=False))
            answers.append(RecordedAnswer.of(prompt.name, prompt.text, params.seed, output))
    return Recording(
        model=MODEL,
        max_tokens=MAX_TOKENS,
        temperature=temperature,
        ignore_eos=True,
        answers=tuple(answers),
    )


def _with(recording: Recording, answers: Sequence[RecordedAnswer]) -> Recording:
    return Recording(
        model=recording.model,
        max_tokens=recording.max_tokens,
        temperature=recording.temperature,
        ignore_eos=recording.ignore_eos,
        answers=tuple(answers),
    )
