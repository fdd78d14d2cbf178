"""Matches one answer against one structured output by llguidance, within limits.

Imports neither torch nor transformers: the process that runs it starts quickly.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from ...core.errors import RequestError
from .lark import lark_choice, lark_regex

FIELD = "structured_outputs"
# Longest message of llguidance that is passed on.
MAX_MESSAGE_LEN = 400
# Time limit for the nodes of one tree; the rest is dropped, so that the root's mask is not late.
TREE_BUDGET_S = 0.05
# A grammar that needs more is ambiguous beyond use: the time of a mask grows with the square of a
# row's items, and a state takes up to 2 kB. Error messages must not quote the grammar.
LIMITS = LLParserLimits(max_items_in_row=1000, max_lexer_states=50_000, verbose_errors=False)


class Matcher:
    """State of one structured output in its answer. Raises `RequestError` beyond a limit."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        grammar_of: tuple[str, str],
        vocab_size: int,
        end_ids: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`grammar_of`: the kind and the value of a `StructuredOutput`."""
        kind, value = grammar_of
        grammar = _grammar(kind, value)
        # A grammar that repeats without end or grows too large fails here, within bounds.
        if problem := LLMatcher.validate_grammar(grammar, tokenizer, limits=LIMITS):
            raise _error(kind, problem)
        self._kind = kind
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        self._words = -(-vocab_size // 32)
        self._end_ids = frozenset(end_ids)
        self._clock = clock
        self._check()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow committed tokens."""
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            raise _error(self._kind, self._matcher.get_error() or "cannot go on")

    def follow(
        self, tokens: Sequence[int], parents: Sequence[int]
    ) -> tuple[list[int], NDArray[np.uint32]]:
        """Rows of a tree that the grammar allows, 0 the root's and i + 1 node i's, and their masks.

        A mask, uint32 [words], is of the tokens allowed after a row. The root comes first.
        """
        children: list[list[int]] = [[] for _ in range(1 + len(tokens))]
        for node, parent in enumerate(parents):
            children[parent + 1].append(node)
        rows: list[int] = []
        masks: list[NDArray[np.uint32]] = []
        deadline = self._clock() + TREE_BUDGET_S
        for row in self._walk(0, children, tokens, deadline):
            mask = np.zeros(self._words, dtype=np.uint32)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check()
            rows.append(row)
            masks.append(mask)
        return rows, np.stack(masks)

    def _walk(
        self,
        row: int,
        children: Sequence[Sequence[int]],
        tokens: Sequence[int],
        deadline: float,
    ) -> Iterator[int]:
        """Yields the root and every allowed node, with the matcher's state after it."""
        yield row
        for node in children[row]:
            if self._clock() > deadline:
                return
            # Nothing follows the end.
            if tokens[node] in self._end_ids:
                continue
            if self._matcher.try_consume_tokens([tokens[node]]):
                yield from self._walk(node + 1, children, tokens, deadline)
                self._matcher.rollback(1)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _error(self._kind, self._matcher.get_error())


def _error(kind: str, message: str) -> RequestError:
    # The rest of the message describes the library's state.
    reason = message.partition("<state>")[0].strip()
    return RequestError(FIELD, f"{kind}: {reason[:MAX_MESSAGE_LEN]}")


def _grammar(kind: str, value: str) -> str:
    match kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"})
        case "json":
            return LLMatcher.grammar_from_json_schema(_schema(value))
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(_json(value, "choice")))
        case "regex":
            return LLMatcher.grammar_from_lark(f"start: {lark_regex(value)}")
        case "grammar":
            return LLMatcher.grammar_from_lark(value)
    raise AssertionError(kind)


def _json(text: str, kind: str) -> object:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RequestError(FIELD, f"{kind}: is not valid JSON: {error}") from None


def _schema(text: str) -> dict[str, Any]:
    schema = _json(text, "json")
    if not isinstance(schema, dict):
        raise RequestError(FIELD, "json: must be an object, the schema")
    return schema


def _choice(texts: object) -> str:
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise RequestError(FIELD, "choice: must be a list of texts")
    return f"start: {lark_choice(texts)}"
