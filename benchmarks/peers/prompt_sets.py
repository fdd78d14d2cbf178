"""Sets of prompts by label, cut to those that the model can read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from ...core.errors import ConfigError
from ...deploy.cli.bench.prompts import bench_prompts
from ...measure.prompts.bench_prompt import BenchPrompt
from ...models.text.tokenizer import load_tokenizer
from .servers import MAX_MODEL_LEN, TARGET

BUNDLED = "bundled"
FIELD = "prompts"


def read_sets(options: Sequence[str], tokens: int) -> dict[str, list[BenchPrompt]]:
    """The sets of `bundled` and of LABEL=FILE; each leaves room for answers of so many tokens.

    Texts that stand twice are taken once. Raises `ConfigError`.
    """
    tokenizer = load_tokenizer(TARGET)
    # The tokenizer warns of each text that its model cannot read: they are left out here.
    tokenizer.model_max_length = 10**9
    room = MAX_MODEL_LEN - tokens
    sets: dict[str, list[BenchPrompt]] = {}
    for option in options:
        label, path = read_option(option)
        if label in sets:
            raise ConfigError(FIELD, f"{label} is given twice")
        sets[label] = fitting(bench_prompts(path), lambda text: len(tokenizer.encode(text)), room)
    return sets


def read_option(option: str) -> tuple[str, Path | None]:
    """A label and its file; None for the bundled ones. Raises `ConfigError`."""
    label, equals, path = option.partition("=")
    if option == BUNDLED:
        return BUNDLED, None
    if not equals or not label or not path:
        raise ConfigError(FIELD, f"{option!r} is neither {BUNDLED} nor LABEL=FILE")
    return label, Path(path)


def fitting(
    prompts: Sequence[BenchPrompt], count: Callable[[str], int], room: int
) -> list[BenchPrompt]:
    """Prompts of at most `room` tokens, each text once, in their order."""
    once: dict[str, BenchPrompt] = {}
    for prompt in prompts:
        once.setdefault(prompt.text, prompt)
    return [prompt for prompt in once.values() if count(prompt.text) <= room]
