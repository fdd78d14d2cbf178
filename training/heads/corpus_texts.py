"""Texts with their authors' continuations, instead of the target's answers to the same prompts.

The baseline for self-distillation (SpecFormer, arXiv 2511.20340): a drafter trained on these
imitates human text, not its target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ...core.errors import ConfigError
from ..corpus import SourceFile
from ..prompts import Prompt, cut_prompts
from .distilled_texts import DistilledText

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
