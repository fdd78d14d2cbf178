"""Turns a prompt and sampling parameters into a request that the engine can run."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from transformers import PreTrainedTokenizerBase

from ...core.arrays import Int32
from ...core.errors import RequestError
from ...core.kv_cache import PrefixKeys
from ...core.request.allowed_tokens import (
    AllowedTokens,
    BannedSequences,
    Constraint,
    allowed_tokens_of,
)
from ...core.request.request import Request, Sink
from ...core.request.sampling_params import (
    RequestOptions,
    SamplingParams,
    answer_room,
    check_vocabulary,
    checked_prompt,
)
from ...core.request.stop import SilentStream, StopRule, stop_token_ids
from ...models.load.model_info import ModelInfo
from ...models.text.grammar import GrammarConstraint, GrammarFactory
from ...models.text.tokenizer import Detokenizer, TokenBytes, bad_word_ids

Prompt = str | Sequence[int]
_SILENT = SilentStream()


@dataclass(frozen=True, slots=True)
class RequestFactory:
    """Builds requests that fit one model. `max_model_len` counts prompt and answer.

    `block_size` of the blocks whose keys come with a request; None: it comes without.
    """

    tokenizer: PreTrainedTokenizerBase
    bytes_of: TokenBytes
    info: ModelInfo
    max_model_len: int
    grammars: GrammarFactory
    block_size: int | None = None
    random_seed: Callable[[], int] = lambda: secrets.randbits(62)

    def build(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        sink: Sink,
        options: RequestOptions,
        *,
        constraint: Constraint | None = None,
        num_kv_slots: int | None = None,
        with_text: bool = True,
    ) -> tuple[Request, StopRule]:
        """A request and its stop rule. Raises `RequestError` naming prompt or parameter.

        constraint    of `params.structured_output`, where it is there already
        num_kv_slots  tokens that the engine's KV cache holds; None: no bound
        with_text     whether deltas have text; those of a request with stop texts always have
        """
        prompt_ids = self.prompt_ids(prompt)
        max_tokens = self._max_tokens(len(prompt_ids), params, num_kv_slots)
        params, sequences = self._without_bad_words(params)
        self._check_tokens(params)
        request = Request(
            request_id=request_id,
            prompt_ids=prompt_ids,
            params=params,
            seed=self.random_seed() if params.seed is None else params.seed,
            max_tokens=max_tokens,
            sink=sink,
            options=options,
            allowed_tokens=self._allowed_tokens(params, constraint, sequences),
            keys=self._keys(prompt_ids, params, options),
        )
        stream = self.text_stream(prompt_ids, params) if with_text or params.stop else _SILENT
        stop = StopRule(
            params, self.info.eos_token_ids, max_tokens, stream, self._special_stops(params)
        )
        if options.answered:
            self._go_on(request, stop)
        return request, stop

    def _go_on(self, request: Request, stop: StopRule) -> None:
        """Bring what follows the answer to the end of the tokens that it has already."""
        answered = request.options.answered
        check_vocabulary("answered", answered, self.info.vocab_size)
        if stop.advance(answered).finish_reason is not None:
            raise RequestError("answered", "holds an end of the answer; nothing can follow")
        if request.allowed_tokens is not None:
            request.allowed_tokens.advance(answered)

    def _keys(
        self, prompt_ids: Int32, params: SamplingParams, options: RequestOptions
    ) -> PrefixKeys | None:
        if self.block_size is None or params.prompt_logprobs is not None:
            return None
        keys = PrefixKeys(options.salt, self.block_size)
        # All blocks that may be shared: the last token is computed in any case.
        keys.upto(prompt_ids, len(prompt_ids) - 1)
        return keys

    def text_stream(self, prompt_ids: Int32, params: SamplingParams) -> Detokenizer:
        """Makes the text of an answer to this prompt."""
        skips = params.skip_special_tokens
        return Detokenizer(self.bytes_of, prompt_ids, skip_special_tokens=skips)

    def _special_stops(self, params: SamplingParams) -> Mapping[int, str]:
        """Stop texts that are special tokens, which the text of the answer leaves out, by id."""
        if not (params.stop and params.skip_special_tokens):
            return {}
        specials = self.bytes_of.special_tokens
        return {index: text for index, text in specials.items() if text in params.stop}

    def prompt_ids(self, prompt: Prompt) -> Int32:
        """Token ids of a text, or the given ones, checked."""
        is_text = isinstance(prompt, str)
        ids = self.tokenizer(prompt, verbose=False)["input_ids"] if is_text else prompt
        return checked_prompt(ids, self.info.vocab_size)

    def _check_tokens(self, params: SamplingParams) -> None:
        """Raises `RequestError` for tokens beyond the vocabulary, or if none is left to choose."""
        size = self.info.vocab_size
        named = {
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
            "banned_token_ids": params.banned_token_ids,
        }
        for name, ids in named.items():
            check_vocabulary(name, ids, size)
        banned = set(params.banned_token_ids)
        allowed = params.allowed_token_ids
        if len(banned) == size or (allowed and banned.issuperset(allowed)):
            raise RequestError("banned_token_ids", "leaves no token that may be chosen")

    def _without_bad_words(
        self, params: SamplingParams
    ) -> tuple[SamplingParams, BannedSequences | None]:
        """Bad words of one token as banned tokens, which drafters know of; and the longer ones."""
        if not params.bad_words:
            return params, None
        size = self.info.vocab_size
        words = bad_word_ids(params.bad_words, self.tokenizer)
        single = [word[0] for word in words if len(word) == 1 and word[0] < size]
        longer = [word for word in words if len(word) > 1]
        params = replace(params, banned_token_ids=(*params.banned_token_ids, *single))
        return params, BannedSequences(longer, size) if longer else None

    def constraint(self, params: SamplingParams) -> Future[GrammarConstraint] | None:
        """Begin to prepare the form of an answer, which may take seconds; None: it has none.

        Raises, or the future does, `RequestError`.
        """
        form = params.structured_output
        return None if form is None else self.grammars.constraint(form)

    def _allowed_tokens(
        self,
        params: SamplingParams,
        constraint: Constraint | None,
        sequences: BannedSequences | None,
    ) -> AllowedTokens | None:
        if constraint is None and (preparing := self.constraint(params)) is not None:
            constraint = preparing.result()
        end_ids = stop_token_ids(params, self.info.eos_token_ids)
        return allowed_tokens_of(params, end_ids, self.info.vocab_size, constraint, sequences)

    def _max_tokens(self, prompt_len: int, params: SamplingParams, num_kv_slots: int | None) -> int:
        """Most tokens of the answer: what is asked for, or as many as fit."""
        most, holder = self.max_model_len, ""
        if num_kv_slots is not None and num_kv_slots < most:
            most, holder = num_kv_slots, f"the KV cache of {num_kv_slots} (kv_cache_tokens)"
        limits = {"max_tokens": params.max_tokens, "min_tokens": params.min_tokens}
        room = answer_room(prompt_len, most, limits, holder)
        return room if params.max_tokens is None else params.max_tokens
