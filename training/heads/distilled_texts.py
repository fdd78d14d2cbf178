"""Texts for the training of heads, one line of JSON each: a target generated them.

Or their authors did: texts with these continuations stand in place of the target's answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.errors import ConfigError
from ..corpus import SourceFile
from ..prompts import Prompt, cut_prompts

TEXTS, MANIFEST = "texts.jsonl", "manifest.json"


class DistilledText(NamedTuple):
    """A text's token ids, of which the first `num_prompt` were given."""

    tokens: tuple[int, ...]
    num_prompt: int


class TextFolder:
    """An append-only folder of texts that survives a killed process: a partial line is cut off.

    Its manifest names the target and settings; texts of others are refused.
    """

    def __init__(self, folder: Path, manifest: dict[str, object]) -> None:
        """Open or begin a folder. Raises `ConfigError` if it holds texts of another manifest."""
        self._path = folder / TEXTS
        path = folder / MANIFEST
        if path.is_file():
            known = json.loads(path.read_text("utf-8"))
            other = [name for name in manifest if known.get(name) != manifest[name]]
            if other:
                raise ConfigError(
                    "output",
                    f"{folder} holds texts whose {other[0]} is {known.get(other[0])!r}, not "
                    f"{manifest[other[0]]!r}; give another folder",
                )
        else:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        self._cut_torn_line()

    def __len__(self) -> int:
        if not self._path.is_file():
            return 0
        with self._path.open("rb") as file:
            return sum(1 for _ in file)

    def add(self, texts: Iterable[DistilledText]) -> None:
        """Append texts."""
        with self._path.open("a", encoding="utf-8") as file:
            for text in texts:
                file.write(json.dumps({"tokens": text.tokens, "num_prompt": text.num_prompt}))
                file.write("\n")

    def _cut_torn_line(self) -> None:
        if not self._path.is_file():
            return
        content = self._path.read_bytes()
        if content and not content.endswith(b"\n"):
            self._path.write_bytes(content[: content.rfind(b"\n") + 1])


def read_texts(folder: Path) -> list[DistilledText]:
    """All texts of a folder. Raises `ConfigError` if it has none, naming the line of a bad one."""
    path = folder / TEXTS
    if not path.is_file():
        raise ConfigError("texts", f"{path} does not exist; make it with `draftline train data`")
    found = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                fields = json.loads(line)
                found.append(DistilledText(tuple(fields["tokens"]), int(fields["num_prompt"])))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError("texts", f"{path}, line {number} is no text: {error}") from error
    if not found:
        raise ConfigError("texts", f"{path} is empty; make it with `draftline train data`")
    return found


def text_batch(texts: Iterable[DistilledText], window: int) -> tuple[Tensor, Tensor]:
    """int64 and bool [texts, length]: tokens, and whether the target generated them. At most
    `window` long.

    Longer texts are truncated. Shorter ones are padded at the end with token 0, which is never
    attended.
    """
    rows = [(text.tokens[:window], text.num_prompt) for text in texts]
    length = max(len(tokens) for tokens, _ in rows)
    ids = np.zeros((len(rows), length), dtype=np.int64)
    said = np.zeros((len(rows), length), dtype=np.bool_)
    for index, (tokens, num_prompt) in enumerate(rows):
        ids[index, : len(tokens)] = tokens
        said[index, num_prompt : len(tokens)] = True
    return torch.from_numpy(ids), torch.from_numpy(said)


# Characters a token: enough of a file for the wanted number of tokens.
CHARACTERS_PER_TOKEN = 32


def corpus_texts(
    texts: Sequence[DistilledText], files: Iterable[SourceFile], prompts_per_file: int,
    encode: Callable[[str], Sequence[int]],
) -> list[DistilledText]:  # fmt: skip
    """Each text's prompt, followed by the next tokens of its file, as many as the target generated.

    files, prompts_per_file  the files that the prompts were cut from
    encode                   the target's tokenizer

    Raises `ConfigError` if a prompt was not cut from these files.
    """
    most = CHARACTERS_PER_TOKEN * max(len(text.tokens) - text.num_prompt for text in texts)
    behind = {
        tuple(encode(prompt.prompt)): following[:most]
        for file in files
        for prompt, following in _with_following(file, prompts_per_file)
    }
    return [_as_written(text, behind, encode) for text in texts]


def _with_following(file: SourceFile, count: int) -> Iterable[tuple[Prompt, str]]:
    lines = file.text.splitlines()
    for prompt in cut_prompts(file, count):
        end = int(prompt.name.rpartition(":")[2])
        yield prompt, "\n" + "\n".join(lines[end:])


def _as_written(
    text: DistilledText, behind: dict[tuple[int, ...], str], encode: Callable[[str], Sequence[int]]
) -> DistilledText:
    prompt = text.tokens[: text.num_prompt]
    if prompt not in behind:
        raise ConfigError(
            "self_distillation",
            "can be left out of texts whose prompts `draftline train data` cut from the training "
            "files of this machine; a prompt of these is none of them",
        )
    count = len(text.tokens) - text.num_prompt
    return DistilledText((*prompt, *encode(behind[prompt])[:count]), text.num_prompt)
