"""A user's sampling parameters, and how the request is served; both validated."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..arrays import Int32
from ..errors import RequestError, are_token_ids, is_number, is_whole, require, shortened
from ..proposals import LogitsParams, cache_key
from .allowed_tokens import StructuredOutput

MAX_SEED = 2**63 - 1
MAX_LOG_PROBS = 20
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 128
MAX_PRIORITY = 2**31 - 1
MAX_SALT_CHARS = 512
MAX_SESSION_CHARS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(LogitsParams):
    """How to choose tokens and when to stop.

    max_tokens      most tokens to generate; None: up to the model's context; 0: the prompt is
                    computed, for its log-probabilities, and nothing is generated
    temperature     0 is greedy
    top_k           keep the k most probable tokens; 0 is off
    top_p           keep the smallest set of tokens with at least this probability; 1 is off
    min_p           drop tokens less probable than this times the most probable; 0 is off
    typical_p       keep the tokens of nearly expected surprise up to this probability; 1 is off
    seed            of the sampling noise: one seed, one text, with any drafters; None: random
    stop            texts that end the answer; they are not part of it
    stop_token_ids  tokens that end the answer; they are part of `token_ids`, not of the text
    include_stop_str_in_output  whether the stop text, or the text of the stop token, that ends the
                    answer is part of its text
    ignore_eos      go on after the model's end-of-sequence token
    min_tokens      neither a token nor a text ends the answer before it has so many
    repetition_penalty  makes tokens of prompt and answer less likely above 1; 1 is off
    presence_penalty    subtracted from the logits of the answer's tokens, -2 to 2
    frequency_penalty   subtracted for each time that the answer has a token, -2 to 2
    logit_bias          added to the logits of tokens, by id
    allowed_token_ids   the only tokens that may be chosen; None: all
    banned_token_ids    tokens that may not be chosen
    bad_words           texts that the answer may not hold, as the tokenizer spells them at a text's
                        start and after a space; another spelling of the same text may come
    structured_output   a form that the answer must have
    skip_special_tokens whether special tokens have no text
    logprobs            log-probabilities of the answer's tokens and of so many of the most probable
                        beside each; None: none
    prompt_logprobs     the same of the prompt's tokens

    Log-probabilities are the target's own, before any of the above changes them. Raises
    `RequestError` naming the field.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    structured_output: StructuredOutput | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        # `super()` does not work in a dataclass with slots.
        LogitsParams.__post_init__(self)
        self._check_types()
        self._check_limits()

    def _check_types(self) -> None:
        require(is_number(self.temperature), "temperature", "must be a finite number")
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or is_whole(value), name, "must be a whole number")
        listed = isinstance(self.stop, tuple) and all(isinstance(text, str) for text in self.stop)
        require(listed, "stop", "must be a tuple of str")
        listed = are_token_ids(self.stop_token_ids)
        require(listed, "stop_token_ids", "must be a tuple of token ids")
        words = self.bad_words
        listed = isinstance(words, tuple) and all(isinstance(word, str) for word in words)
        require(listed, "bad_words", "must be a tuple of str")

    def _check_limits(self) -> None:
        require(0 <= self.temperature <= 100, "temperature", "must be from 0 to 100")
        most = self.max_tokens
        require(most is None or most >= 0, "max_tokens", "must be 0 or more")
        fits = most is None or self.min_tokens <= most
        require(fits, "min_tokens", "must not exceed max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            fits = value is None or 0 <= value <= MAX_LOG_PROBS
            require(fits, name, f"must be from 0 to {MAX_LOG_PROBS}")
        require(
            self.structured_output is None or not self.ignore_eos,
            "ignore_eos",
            "does not go with a structured output, which ends where its form is complete",
        )
        require(
            self.seed is None or 0 <= self.seed <= MAX_SEED, "seed", "must be from 0 to 2**63 - 1"
        )
        require(all(self.stop), "stop", "must not hold an empty text")
        self._check_bad_words()

    def _check_bad_words(self) -> None:
        words = self.bad_words
        require(len(words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} texts")
        require(all(word.strip() for word in words), "bad_words", "must not hold an empty text")
        fits = all(len(word) <= MAX_BAD_WORD_CHARS for word in words)
        require(fits, "bad_words", f"a text has at most {MAX_BAD_WORD_CHARS} characters")


PipeliningMode = Literal["auto", "on", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Changes when and how fast an answer comes, never its text.

    namespace    whose retrieval data and KV prefixes it may use: `shared` or a tenant's
    tenant       whose work it is, where the engine's time is shared out
    weight       of that tenant: its part of the time beside that of others
    priority     requests of a lower number go first, and give up their KV last
    cache_salt   KV, and what drafters learn, is shared only among requests of the same namespace
                 and salt
    store        whether drafters may learn from it for later requests
    speculative  whether drafters are asked
    max_nodes    most nodes of its tree; None: the engine's limit
    max_context  tokens of prompt and answer beyond which nothing is drafted; None: no limit
    drafters     whose proposals it takes, by name, of those that the node budget asks; None:
                 everyone's
    pipelined_trees  whether its tree may go through the stages in chunks, several at a time: `auto`
                 where that pays, `on` wherever the engine allows it
    explain      whether its deltas hold the trees that they come from; such a request goes in
                 rounds, whatever `pipelined_trees` says
    session      where an engine has several replicas, requests of one session go to the same one;
                 empty: it is of none
    answered     first tokens of the answer, which another engine has sent: the answer goes on
                 behind them, and they are not sent again

    Raises `RequestError` naming the field.
    """

    namespace: str = "shared"
    tenant: str = "shared"
    weight: float = 1.0
    priority: int = 0
    cache_salt: str = ""
    store: bool = True
    speculative: bool = True
    max_nodes: int | None = None
    max_context: int | None = None
    drafters: tuple[str, ...] | None = None
    pipelined_trees: PipeliningMode = "auto"
    explain: bool = False
    session: str = field(default="", repr=False)
    answered: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if abs(self.priority) > MAX_PRIORITY:
            raise RequestError("priority", f"must be from {-MAX_PRIORITY} to {MAX_PRIORITY}")
        if not self.weight > 0:
            raise RequestError("weight", "must be above 0")
        if self.max_nodes is not None and self.max_nodes < 0:
            raise RequestError("speculative.max_tokens", "must be 0 or more")
        if self.max_context is not None and self.max_context < 0:
            raise RequestError("speculative.max_context", "must be 0 or more")
        if len(self.cache_salt) > MAX_SALT_CHARS:
            raise RequestError("cache_salt", f"must have at most {MAX_SALT_CHARS} characters")
        fits = len(self.session) <= MAX_SESSION_CHARS
        require(fits, "x-session-id", f"must have at most {MAX_SESSION_CHARS} characters")
        require(are_token_ids(self.answered), "answered", "must be a tuple of token ids")

    @property
    def salt(self) -> str:
        """What the keys of its KV blocks begin with: only requests of the same one share any."""
        return cache_key(self.namespace, self.cache_salt)


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
    for name, limit in limits.items():
        if limit is not None and limit > room:
            raise RequestError(
                name,
                f"{limit} and the prompt's {prompt_len} tokens exceed {holder}; at most {room} fit",
            )
    return room
