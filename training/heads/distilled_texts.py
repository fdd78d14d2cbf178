"""Texts for the training of heads, one line of JSON each: a target generated them.

Or their authors did: texts with these continuations stand in place of the target's answers.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.errors import ConfigError
from ..corpus import SourceFile
from ..prompts import Prompt, cut_prompts

TEXTS, MANIFEST = "texts.jsonl", "manifest.json"
# A folder that is kept may have its texts compressed.
PACKED_TEXTS = "texts.jsonl.gz"


class DistilledText(NamedTuple):
    """A text's token ids; the target generated those of `answers`, each from start to before end.

    The others were given: a prompt, or what users say in a chat and the template around it.
    """

    tokens: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]

    @property
    def num_prompt(self) -> int:
        """Tokens before the first answer."""
        return self.answers[0][0]

    def answer_mask(self) -> NDArray[np.bool_]:
        """bool [tokens]: whether the target generated each."""
        mask = np.zeros(len(self.tokens), dtype=np.bool_)
        for start, end in self.answers:
            mask[start:end] = True
        return mask


class TextFolder:
    """An append-only folder of texts that survives a killed process: a partial line is cut off.

    Each text has the number of the prompt that it began with; texts are added as they are done, in
    any order. The manifest names the target and settings; texts of others are refused.
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

    def done(self) -> frozenset[int]:
        """Numbers of the prompts whose texts the folder has."""
        if not self._path.is_file():
            return frozenset()
        with self._path.open("rb") as file:
            return frozenset(json.loads(line)["prompt"] for line in file)

    def add(self, prompt: int, texts: Iterable[DistilledText]) -> None:
        """Append all texts of a prompt."""
        lines = (
            json.dumps({"prompt": prompt, "tokens": text.tokens, "answers": text.answers})
            for text in texts
        )
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def _cut_torn_line(self) -> None:
        if not self._path.is_file():
            return
        content = self._path.read_bytes()
        if content and not content.endswith(b"\n"):
            self._path.write_bytes(content[: content.rfind(b"\n") + 1])


def read_texts(folder: Path) -> list[DistilledText]:
    """All texts of a folder in the order of their prompts. Raises `ConfigError` if it has none,
    naming the line of a bad one.
    """
    path, packed = folder / TEXTS, folder / PACKED_TEXTS
    if not path.is_file() and not packed.is_file():
        raise ConfigError("texts", f"{path} does not exist; make it with `draftline train data`")
    found: list[tuple[int, DistilledText]] = []
    read = path.open if path.is_file() else partial(gzip.open, packed, "rt")
    with read(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                found.append(_parsed(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError("texts", f"{path}, line {number} is no text: {error}") from error
    if not found:
        raise ConfigError("texts", f"{path} is empty; make it with `draftline train data`")
    return [text for _, text in sorted(found, key=lambda one: one[0])]


def _parsed(fields: dict[str, Any]) -> tuple[int, DistilledText]:
    """A text and the number of its prompt. Raises `ValueError`, `KeyError`, `TypeError`."""
    tokens = tuple(fields["tokens"])
    answers = tuple((int(start), int(end)) for start, end in fields["answers"])
    bounds = [place for answer in answers for place in answer]
    if not answers or bounds != sorted(bounds) or not 0 <= bounds[0] < bounds[-1] <= len(tokens):
        raise ValueError(f"its answers {answers} are no parts of {len(tokens)} tokens")
    return int(fields["prompt"]), DistilledText(tokens, answers)


def text_batch(texts: Iterable[DistilledText], window: int) -> tuple[Tensor, Tensor]:
    """int64 and bool [texts, length]: tokens, and whether the target generated them. At most
    `window` long.

    Longer texts are truncated. Shorter ones are padded at the end with token 0, which is never
    attended.
    """
    rows = [(text.tokens[:window], text.answer_mask()[:window]) for text in texts]
    length = max(len(tokens) for tokens, _ in rows)
    ids = np.zeros((len(rows), length), dtype=np.int64)
    mask = np.zeros((len(rows), length), dtype=np.bool_)
    for index, (tokens, own) in enumerate(rows):
        ids[index, : len(tokens)] = tokens
        mask[index, : len(tokens)] = own
    return torch.from_numpy(ids), torch.from_numpy(mask)


# Characters a token: enough of a file for the wanted number of tokens.
CHARACTERS_PER_TOKEN = 32


def corpus_texts(
    texts: Sequence[DistilledText], files: Iterable[SourceFile], prompts_per_file: int,
    encode: Callable[[str], Sequence[int]],
) -> list[DistilledText]:  # fmt: skip
    """Each text's prompt, followed by the next tokens of its file, as many as the target generated.
    Texts have one answer.

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
    tokens = (*prompt, *encode(behind[prompt])[: len(text.tokens) - len(prompt)])
    return DistilledText(tokens, ((len(prompt), len(tokens)),))
