"""The tokens that a target says most often, for heads that draft no others."""

from __future__ import annotations

import json

import numpy as np
from rich.console import Console

from ....core.errors import ConfigError
from ....models.load.model_info import read_model_info
from ....training.heads.distilled_texts import read_texts
from ....training.heads.feature_passes.draft_vocabulary import frequent_tokens
from .job import TokenMapJob


def make_token_map(job: TokenMapJob, console: Console) -> None:
    """Write the ids, and say how much of the answers they are.

    Raises `CheckpointError`, or `ConfigError` (`texts`, `size`).
    """
    vocab_size = read_model_info(job.model).vocab_size
    size = job.size or vocab_size // 4
    if size > vocab_size:
        raise ConfigError("size", f"{job.model} has {vocab_size} tokens; ask for fewer")
    texts = read_texts(job.texts)
    said = np.concatenate([text.tokens[text.num_prompt :] for text in texts])
    if said.max(initial=0) >= vocab_size:
        raise ConfigError("texts", f"{job.texts} has tokens that {job.model} does not have")
    tokens = frequent_tokens(texts, vocab_size, size).tolist()
    job.output.parent.mkdir(parents=True, exist_ok=True)
    job.output.write_text(json.dumps(tokens) + "\n", encoding="utf-8")
    share = np.isin(said, tokens).mean()
    console.print(
        f"{len(tokens)} of {vocab_size} tokens, {share:.1%} of what {len(texts)} texts say, in "
        f"{job.output}"
    )
