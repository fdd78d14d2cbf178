"""The loads and the modes that are measured, and the answers that are replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path

from ....cluster.config import DrafterConfig, EngineConfig
from ....core.request.sampling_params import PipeliningMode, RequestOptions
from ....deploy.cli.demo.prompts import held_out_prompts
from ....deploy.engine.engine import Engine
from ....measure.prompts import BenchPrompt, read_prompts
from ....measure.replay.recording import RecordedAnswer, Recording, read_recording, recorded_params
from ....measure.runs.matched import Plan

BUNDLED = "bundled"
TEMPERATURES = (0.0, 1.0)
# Drafters of more than one request, or fewer stages.
LOADED = ("suffix", "all training-free")
# Answers of one request at a time, and of a request beside others, a round.
PROMPTS_ALONE, PROMPTS_EACH = 8, 2
# Nodes of a tree, and of each drafter's.
TREE_NODES = 60
MODES: Mapping[str, PipeliningMode] = {"plain": "off", "rounds": "off", "streamed": "auto"}


def _drafter(kind: str, **options: object) -> DrafterConfig:
    return DrafterConfig(kind=kind, max_nodes=TREE_NODES, **options)


_SUFFIX, _LOOKUP = _drafter("suffix"), _drafter("prompt_lookup")
_SPECTRA, _MODEL = _drafter("spectra"), _drafter("model", model="demo-drafter")
_GRIFFIN = _drafter("head", name="griffin", model="demo-griffin", placement="actor", top_k=10)
_FREE = (
    _SUFFIX, _SPECTRA, _LOOKUP, _drafter("anpd"), _drafter("lookahead"),
    _drafter("token_recycling"), _drafter("retrieval", store="demo"),
)  # fmt: skip
DRAFTERS: Mapping[str, Sequence[DrafterConfig]] = {
    "suffix": (_SUFFIX,),
    "spectra": (_SPECTRA,),
    "prompt_lookup + suffix": (_LOOKUP, _SUFFIX),
    "model": (_MODEL,),
    "griffin": (_GRIFFIN,),
    "all training-free": _FREE,
    "all": (*_FREE, _MODEL, _GRIFFIN),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingLoad:
    """Requests at once, whose answers are those of a set at a temperature.

    drafters  of `DRAFTERS`
    """

    prompts: str
    temperature: float
    drafters: str
    stages: int
    together: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one mode under a load, in one round; times are the simulation's.

    tokens_s    committed a second, of all requests together
    tau         tokens of a request by its steps
    rows        of a request in a step, its root's included
    right, refused, killed  shares of the nodes
    idle        share of the time that the first stage had no work
    host        share of the time that the host worked
    """

    mode: str
    tokens_s: float
    tau: float
    rows: float
    right: float
    refused: float
    killed: float
    idle: float
    host: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamingResult:
    """All modes under a load: by mode, one for each round."""

    load: StreamingLoad
    found: Mapping[str, Sequence[Found]]


# Requests at once, by stages.
TOGETHER = {2: (1, 2, 8, 32), 4: (1, 2, 4, 8, 32), 8: (2, 4, 8, 32)}


def every_load(
    prompts: Sequence[str], temperatures: Sequence[float] = TEMPERATURES
) -> Iterator[StreamingLoad]:
    """One request over 8 stages with all drafters; greedily, ever more requests over fewer with
    some."""
    for name, temperature, drafters in product(prompts, temperatures, DRAFTERS):
        yield StreamingLoad(
            prompts=name, temperature=temperature, drafters=drafters, stages=8, together=1
        )
    if 0.0 not in temperatures:
        return
    for drafters, stages in product(LOADED, TOGETHER):
        for together in TOGETHER[stages]:
            yield StreamingLoad(
                prompts=BUNDLED, temperature=0.0, drafters=drafters, stages=stages,
                together=together,
            )  # fmt: skip


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
