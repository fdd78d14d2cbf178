"""`draftline train data`: what a target says, by an engine with its drafters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Any

from rich.console import Console

from ....cluster.config import DrafterConfig, EngineConfig
from ....core.errors import ConfigError, DraftlineError
from ....core.progress import Work
from ....core.request.output import RequestOutput
from ....core.request.sampling_params import SamplingParams
from ....measure.clients.engine_endpoint import prompt_ids
from ....measure.prompts import BenchPrompt, read_prompts
from ....models.load.checkpoint import answers_chats
from ....models.text.chat_template import ChatOptions, ChatTemplate
from ....training.corpus import training_files
from ....training.heads.distilled_texts import DistilledText, TextFolder
from ....training.prompts import cut_prompts
from ...engine.async_engine import AsyncEngine
from ...ray_serve.runtime import quiet_libraries
from ...settings.settings import DEFAULT_DRAFTERS
from ..flags import FlagGroup
from ..progress import progress
from .job import DataJob
from .stages import STAGE_SETTINGS, STAGES

# Prompts of each file that the demo models were trained on.
PROMPTS_PER_FILE = 8
# A user's turn that the target invents: most tokens, and tries until one ends and says something.
MAX_TURN_TOKENS, TURN_TRIES = 256, 8
# Stands for a user's turn in a rendered template.
TURN = "What the user says stands here."

Message = dict[str, str]


ENGINE = FlagGroup(
    title="Engine",
    kind=EngineConfig,
    only=(
        *STAGE_SETTINGS, "max_model_len", "max_num_batched_tokens", "gpu_memory_utilization",
    ),
    names=STAGES.names,
)  # fmt: skip


def make_texts(job: DataJob, settings: Mapping[str, Any], console: Console) -> None:
    """Answer prompts until the folder has `num_texts` of them; those that it has are kept.

    settings  of the engine, besides model, drafters and `max_num_seqs`

    Raises `ConfigError`.
    """
    temperatures, is_chat = read_temperatures(job.temperature), answers_chats(job.model)
    if not is_chat and (job.system_prompt or job.turns > 1):
        name = "system_prompt" if job.system_prompt else "turns"
        raise ConfigError(name, f"needs a chat model; {job.model} has no chat template")
    prompts = None if is_chat and job.prompts is None else _prompts(job)
    shown = "training files" if prompts else "of the target"
    manifest: dict[str, object] = {
        "model": job.model, "seed": job.seed, "temperature": job.temperature, "turns": job.turns,
        "max_tokens": job.max_tokens, "prompts": str(job.prompts or shown),
        "system_prompt": job.system_prompt,
    }  # fmt: skip
    folder = TextFolder(job.output, manifest)
    done = folder.done()
    left = [number for number in range(job.num_texts) if number not in done]
    if left:
        drafters = [DrafterConfig.model_validate(fields) for fields in DEFAULT_DRAFTERS]
        config = EngineConfig(
            model=job.model, drafters=drafters, max_num_seqs=job.max_num_seqs, **settings
        )
        quiet_libraries()
        asyncio.run(_fill(folder, left, prompts, temperatures, job, config, is_chat=is_chat))
    console.print(f"{len(folder.done())} texts in {job.output}")
    if missing := job.num_texts - len(folder.done()):
        console.print(f"{missing} prompts with answers of {job.max_tokens} tokens do not fit")


def read_temperatures(text: str) -> tuple[float, ...]:
    """The temperatures of `--temperature`. Raises `ConfigError`."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise ConfigError(
            "temperature", f"are numbers from 0, separated by commas, such as 0,0.7; not {text!r}"
        )
    return found


def temperature_of(number: int, num_prompts: int | None, temperatures: Sequence[float]) -> float:
    """That of text `number`. Temperatures take turns; a prompt that comes again gets the next one.

    num_prompts  after which they come again; None: each is new
    """
    again, prompt = divmod(number, num_prompts) if num_prompts else (0, number)
    return temperatures[(prompt + again) % len(temperatures)]


def _prompts(job: DataJob) -> list[BenchPrompt]:
    if job.prompts is not None:
        return read_prompts(job.prompts)
    found = [
        BenchPrompt(prompt.name, prompt.prompt)
        for file in training_files(more=True)
        for prompt in cut_prompts(file, PROMPTS_PER_FILE)
    ]
    # Neighbours in a file are alike.
    Random(0).shuffle(found)
    return found


async def _fill(
    folder: TextFolder, left: Sequence[int], prompts: Sequence[BenchPrompt] | None,
    temperatures: Sequence[float], job: DataJob, config: EngineConfig, *, is_chat: bool,
) -> None:  # fmt: skip
    """Texts of the prompts `left`, `max_num_seqs` at once."""
    with progress("starting", total=1, unit="engines"):
        engine = AsyncEngine(config)
        await engine.start()
    numbers = iter(left)

    async def work_off(work: Work) -> None:
        # Workers share the iterator, each takes the next prompt when it is done with one.
        for number in numbers:
            temperature = temperature_of(number, len(prompts) if prompts else None, temperatures)
            texts = Texts(engine, job, number, temperature)
            prompt = prompts[number % len(prompts)] if prompts else None
            if is_chat:
                folder.add(number, await texts.chat(prompt))
            else:
                assert prompt is not None
                folder.add(number, await texts.continued(prompt))
            rate.add(texts.num_tokens)
            work.advance(note=f"{rate.per_second():.0f} tokens/s")

    try:
        done = job.num_texts - len(left)
        with progress("answering", total=job.num_texts, unit="texts", done=done) as work:
            rate = _Rate()
            async with asyncio.TaskGroup() as group:
                for _ in range(job.max_num_seqs):
                    group.create_task(work_off(work))
    except* DraftlineError as failed:
        raise failed.exceptions[0] from None
    finally:
        await engine.close()


class _Rate:
    """Tokens a second since it was made."""

    def __init__(self) -> None:
        self._begin, self._tokens = time.monotonic(), 0

    def add(self, count: int) -> None:
        self._tokens += count

    def per_second(self) -> float:
        return self._tokens / max(time.monotonic() - self._begin, 1e-9)


@dataclass(slots=True)
class Texts:
    """Makes the texts of one prompt. `num_tokens`: generated up to now."""

    engine: AsyncEngine
    job: DataJob
    number: int
    temperature: float
    num_tokens: int = 0

    async def continued(self, prompt: BenchPrompt) -> list[DistilledText]:
        """A prompt with what the target says behind it; nothing where that might have no room."""
        answered = await self._answered(prompt_ids(self.engine.tokenizer, prompt.text))
        return [] if answered is None else [answered[0]]

    async def chat(self, prompt: BenchPrompt | None) -> list[DistilledText]:
        """A chat of which each turn is answered; None: the target invents the turns.

        A chat is one text as long as the template renders earlier answers as they were generated.
        Else (templates that drop thoughts, say) another text begins. An answer that might not have
        room in the context is left out, and with it the rest of its chat. Raises `ConfigError`,
        `RequestError`.
        """
        tokenizer = self.engine.tokenizer
        system = self.job.system_prompt or (prompt.system if prompt else "")
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        turns = _turns(prompt, self.job.turns)
        texts: list[DistilledText] = []
        for turn in turns:
            user_turn = await self._invented(messages) if turn is None else turn
            if user_turn is None and texts:
                break
            if user_turn is None:
                raise ConfigError(
                    "prompts",
                    f"{self.job.model} invents no turns of users; give a file of prompts",
                )
            messages.append({"role": "user", "content": user_turn})
            answered = await self._answered(prompt_ids(tokenizer, tuple(messages)))
            if answered is None:
                break
            text, answer = answered
            messages.append({"role": "assistant", "content": answer})
            earlier = texts[-1] if texts else None
            if earlier is not None and text.tokens[: len(earlier.tokens)] == earlier.tokens:
                texts[-1] = text._replace(answers=(*earlier.answers, *text.answers))
            else:
                texts.append(text)
        return texts

    async def _answered(self, given: Sequence[int]) -> tuple[DistilledText, str] | None:
        """A prompt's tokens with its answer, and the answer's text; None: it might have no room."""
        if len(given) + self.job.max_tokens > self.engine.max_model_len:
            return None
        answer = await self._say(given, self.temperature, self.job.max_tokens)
        tokens = (*given, *answer.token_ids)
        return DistilledText(tokens, ((len(given), len(tokens)),)), answer.text

    async def _invented(self, messages: Sequence[Message]) -> str | None:
        """A user's next turn, as the target goes on behind the template's beginning of one (Magpie,
        arXiv 2406.08464); None: it says none that ends, or there is no room.
        """
        given = self._opened(messages)
        max_tokens = min(MAX_TURN_TOKENS, self.engine.max_model_len - len(given))
        for attempt in range(TURN_TRIES if max_tokens > 0 else 0):
            answer = await self._say(given, 1.0, max_tokens, attempt)
            if answer.text.strip() and answer.finish_reason == "stop":
                return answer.text.strip()
        return None

    def _opened(self, messages: Sequence[Message]) -> list[int]:
        """A chat up to where the user's next turn begins."""
        tokenizer = self.engine.tokenizer
        chat = [*messages, {"role": "user", "content": TURN}]
        text = ChatTemplate(tokenizer).render(chat, ChatOptions(open_answer=False))
        if text.count(TURN) != 1:
            raise ConfigError(
                "prompts", f"the chat template of {self.job.model} changes what users say; give a "
                "file of prompts",
            )  # fmt: skip
        return tokenizer(text.partition(TURN)[0], add_special_tokens=False)["input_ids"]

    async def _say(
        self, given: Sequence[int], temperature: float, max_tokens: int, attempt: int = 0
    ) -> RequestOutput:
        # Every prompt has a seed of its own, and each further try another one.
        seed = self.job.seed + self.number * TURN_TRIES + attempt
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        answer = await self.engine.generate(given, params)
        self.num_tokens += len(answer.token_ids)
        return answer


def _turns(prompt: BenchPrompt | None, count: int) -> Iterator[str | None]:
    """At most `count` turns of a user; None: one to be invented."""
    if prompt is None:
        return iter([None] * count)
    return islice(iter([prompt.text, *prompt.further_turns]), count)
