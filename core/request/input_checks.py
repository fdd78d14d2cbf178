"""What a prompt and the token ids of a request must fit: the vocabulary and the context."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from ..arrays import Int32
from ..errors import RequestError, is_whole, require, shortened


def checked_prompt(token_ids: Sequence[int], vocab_size: int) -> Int32:
    """int32 [len(token_ids)]. Raises `RequestError` naming the first that is no token id."""
    # Prompts may be long: one by one only where something is wrong.
    if not set(map(type, token_ids)) <= {int}:
        for index, token in enumerate(token_ids):
            require(is_whole(token), f"prompt[{index}]", "must be a token id, a whole number")
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        index = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
        check_vocabulary(f"prompt[{index}]", [token_ids[index]], vocab_size)
    return np.array(token_ids, dtype=np.int32)


def check_vocabulary(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raise `RequestError` where an id is outside a vocabulary of this size."""
    for token in (min(token_ids), max(token_ids)) if token_ids else ():
        if not 0 <= token < vocab_size:
            raise RequestError(
                field, f"token id {shortened(token)} is outside the vocabulary of {vocab_size}"
            )


def answer_room(
    prompt_len: int,
    most: int,
    limits: Mapping[str, int | None],
    holder: str = "",
) -> int:
    """How many tokens an answer may have: what a prompt leaves of `most` tokens.

    limits  numbers of tokens that the request asks for, by field; None: as many as there is room
            for. Where the first is 0, only the prompt is to be computed, and no room is needed
    holder  what has room for `most` tokens, with their number; the model's context by default

    Raises `RequestError` naming the prompt, or the limit that does not fit.
    """
    if not prompt_len:
        raise RequestError("prompt", "must not be empty")
    room = most - prompt_len
    holder = holder or f"this model's context of {most}"
    if room < (next(iter(limits.values())) != 0):
        raise RequestError(
            "prompt",
            f"has {prompt_len} tokens, which leave no room for an answer in {holder}",
        )
    for field, limit in limits.items():
        if limit is not None and limit > room:
            raise RequestError(
                field,
                f"{limit} and the prompt's {prompt_len} tokens exceed {holder}; at most {room} fit",
            )
    return room
