"""Prompts of a measurement: conversations from files in the formats of published datasets.

A row's keys identify its format, so that the dataset need not be named. Prompts follow the
dataset's paper, if it defines one.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError
from .records import PromptInput


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """The messages of a user.

    name           unique in its file
    text           the first turn
    category       groups prompts, empty where the file has none
    system         the message before the user's; empty if there is none
    further_turns  each sent after the answer to the previous one; the answers stay in the
                   conversation
    reference      the dataset's answer; empty if it has none
    answer_tokens  most tokens of each answer, besides the measurement's limit; None: no other limit
    arrives_s      seconds after the dataset's first request; None: the dataset has no times
    """

    name: str
    text: str
    category: str = ""
    further_turns: tuple[str, ...] = ()
    reference: str = ""
    answer_tokens: int | None = None
    arrives_s: float | None = None
    system: str = ""

    def asked(self, *, is_chat: bool) -> PromptInput:
        """The first turn, as a text or as messages."""
        if not is_chat:
            return self.text
        system = [{"role": "system", "content": self.system}] if self.system else []
        return (*system, {"role": "user", "content": self.text})


def spread(prompts: Sequence[BenchPrompt], count: int | None) -> list[BenchPrompt]:
    """`count` prompts spread evenly over all of them, so over all categories of a sorted file.

    A larger count repeats prompts; None takes each once.
    """
    total = len(prompts)
    if count is None:
        return list(prompts)
    if count <= total:
        return [prompts[index * total // count] for index in range(count)]
    return [prompts[index % total] for index in range(count)]


Row = Mapping[str, Any]
# Keys of a row's name; the first present one is used.
NAMES = ("question_id", "task_id", "name", "id")
# The speakers in ShareGPT's files: the user's names and the assistant's.
USERS, ANSWERERS = ("human", "user"), ("gpt", "chatgpt", "assistant", "bard", "bing")


@dataclass(frozen=True, slots=True)
class DatasetFormat:
    """How a dataset's rows are read.

    keys   that a row must have, and that distinguish this format from later ones
    read   makes the prompt of a row, given its name; None: it lacks a question or an answer. Raises
           `ValueError` for a damaged row
    """

    keys: tuple[str, ...]
    read: Callable[[str, Row], BenchPrompt | None]


def _turns(name: str, row: Row) -> BenchPrompt:
    """Spec-Bench and MT-Bench: `question_id`, `category`, `turns`, at times `reference`."""
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(one, str) for one in turns):
        raise ValueError("turns: expected a list of texts")
    category = str(row.get("category", ""))
    return BenchPrompt(name, turns[0], category, tuple(turns[1:]))


def _prompt(name: str, row: Row) -> BenchPrompt:
    """HumanEval: `task_id`, `prompt`, `canonical_solution`; ours: `name`, `prompt`."""
    reference = str(row.get("canonical_solution") or "")
    return BenchPrompt(name, _text(row, "prompt"), str(row.get("category", "")), (), reference)


def _gsm8k(name: str, row: Row) -> BenchPrompt:
    """GSM8K: `question`, `answer`."""
    question = f"Question: {_text(row, 'question')}\nAnswer:"
    return BenchPrompt(name, question, reference=_text(row, "answer"))


def _mbpp(name: str, row: Row) -> BenchPrompt:
    """MBPP: `text` (`prompt` in the sanitized file), `code`, `test_list`; the paper's prompt."""
    task = _text(row, "text" if "text" in row else "prompt")
    tests = row["test_list"]
    if not isinstance(tests, list):
        raise ValueError("test_list: expected a list")
    listed = "\n".join(map(str, tests))
    text = (
        f"You are an expert Python programmer, and here is your task: {task} Your code should pass "
        f"these tests:\n\n{listed}\n"
    )
    return BenchPrompt(name, text, reference=_text(row, "code"))


def _cnn_dm(name: str, row: Row) -> BenchPrompt:
    """CNN/DailyMail: `article`, `highlights`."""
    return BenchPrompt(
        name, f"Summarize: {_text(row, 'article')}", reference=_text(row, "highlights")
    )


def _messages(name: str, row: Row) -> BenchPrompt | None:
    """OpenAI's chats, as of its fine-tuning files: `messages` of `role` and `content`."""
    said = [(one.get("role"), one.get("content")) for one in _list(row, "messages")]
    if not all(isinstance(text, str) for role, text in said if role != "assistant"):
        raise ValueError("messages: expected texts")
    system = "\n\n".join(text for role, text in said if role in ("system", "developer") and text)
    turns = [text for role, text in said if role == "user" and text]
    # Of an answer that is a call there is no text.
    answers = [text for role, text in said if role == "assistant" and isinstance(text, str)]
    if not turns:
        return None
    return BenchPrompt(
        name, turns[0], further_turns=tuple(turns[1:]), reference=answers[0] if answers else "",
        system=system,
    )  # fmt: skip


def _sharegpt(name: str, row: Row) -> BenchPrompt | None:
    """ShareGPT: `conversations` of `from` and `value`; a trace also has `timestamp`, in seconds."""
    said = [(one.get("from"), one.get("value")) for one in _list(row, "conversations")]
    turns = [text for who, text in said if who in USERS and text]
    answers = [text for who, text in said if who in ANSWERERS and text]
    if not turns or not answers:
        return None
    when = row.get("timestamp")
    if when is not None and not isinstance(when, int | float):
        raise ValueError("timestamp: expected seconds")
    return BenchPrompt(
        name, turns[0], further_turns=tuple(turns[1:]), reference=answers[0],
        arrives_s=None if when is None else float(when),
    )  # fmt: skip


# Formats are tried in this order.
FORMS: Mapping[str, DatasetFormat] = {
    "sharegpt": DatasetFormat(("conversations",), _sharegpt),
    "messages": DatasetFormat(("messages",), _messages),
    "mt-bench": DatasetFormat(("turns",), _turns),
    "spec-bench": DatasetFormat(("turns",), _turns),
    "mbpp": DatasetFormat(("test_list", "code"), _mbpp),
    "gsm8k": DatasetFormat(("question", "answer"), _gsm8k),
    "cnn-dm": DatasetFormat(("article", "highlights"), _cnn_dm),
    "humaneval": DatasetFormat(("prompt",), _prompt),
}
KNOWN = "`turns` (Spec-Bench, MT-Bench), `prompt` (HumanEval), or the keys of another dataset"


def form_of(row: Row) -> DatasetFormat | None:
    """The format of a row with these keys; None: unknown."""
    return next((form for form in FORMS.values() if row.keys() >= set(form.keys)), None)


def name_of(row: Row, otherwise: str) -> str:
    """The name of a row."""
    return next((str(row[key]) for key in NAMES if key in row), otherwise)


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key}: expected a text")
    return value


def _list(row: Row, key: str) -> Sequence[Mapping[str, Any]]:
    value = row[key]
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise ValueError(f"{key}: expected a list of objects")
    return value


FIELD = "prompts"


def read_prompts(path: Path, dataset: str | None = None) -> list[BenchPrompt]:
    """The prompts of a file, in its order.

    dataset  the format of its rows, one of `FORMS`; None: found by each row's keys

    Arrival times start at the first one. Conversations without an answer (such as some of
    ShareGPT's) are skipped. Raises `ConfigError` naming the line or the row.
    """
    rows = list(_rows(path))
    prompts = [prompt for where, row in rows if (prompt := _parse(where, row, dataset)) is not None]
    if not prompts:
        raise ConfigError(FIELD, f"{path} holds no prompt")
    times = [prompt.arrives_s for prompt in prompts]
    if None in times:
        return prompts
    first = min(time for time in times if time is not None)
    return [replace(one, arrives_s=(one.arrives_s or 0.0) - first) for one in prompts]


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Every row with its location."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(FIELD, f"cannot read {path}: {error}") from error
    if path.suffix == ".csv":
        csv.field_size_limit(2**31 - 1)
        for number, row in enumerate(csv.DictReader(io.StringIO(text)), 2):
            yield f"{path} row {number}", row
    elif text.lstrip().startswith("["):
        for number, row in enumerate(_json(str(path), text)):
            yield f"{path} entry {number}", row
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                where = f"{path} line {number}"
                yield where, _json(where, line)


def _json(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(FIELD, f"{where} is not JSON: {error.msg}") from error


def _parse(where: str, row: Any, dataset: str | None) -> BenchPrompt | None:
    if not isinstance(row, dict):
        raise ConfigError(FIELD, f"{where} is not a JSON object")
    form = form_of(row) if dataset is None else FORMS[dataset]
    if form is None:
        raise ConfigError(FIELD, f"{where} has no text: expected {KNOWN}")
    missing = set(form.keys) - row.keys()
    if missing:
        raise ConfigError(FIELD, f"{where} is no row of {dataset}: it has no {sorted(missing)[0]}")
    try:
        return form.read(name_of(row, where), row)
    except ValueError as error:
        raise ConfigError(FIELD, f"{where}: {error}") from error
