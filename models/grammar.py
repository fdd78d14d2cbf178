"""Answers of a given form, by llguidance: which tokens a grammar allows, node by node."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from transformers import PreTrainedTokenizerBase

from ..core.errors import RequestError
from ..core.structured_output import StructuredOutput
from ..core.token_mask import num_words
from ..core.tree import TokenTree
from ..core.types import ROOT, Bool, UInt32

FIELD = "structured_outputs"


class GrammarFactory:
    """Makes constraints for one model; the tokenizer is prepared at the first one."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._prepared: LLTokenizer | None = None

    def constraint(self, output: StructuredOutput) -> GrammarConstraint:
        """A constraint at the start of an answer. Raises `RequestError`."""
        tokenizer = self._prepare()
        grammar = _grammar(output)
        # A grammar that repeats without end or grows too large fails here, within bounds.
        problem = LLMatcher.validate_grammar(grammar, tokenizer)
        if problem:
            raise RequestError(output.field, f"{output.kind}: {problem.strip()}")
        matcher = LLMatcher(tokenizer, grammar)
        if matcher.is_error():
            raise RequestError(output.field, f"{output.kind}: {matcher.get_error().strip()}")
        return GrammarConstraint(matcher, self._vocab_size, self._eos_token_ids)

    def _prepare(self) -> LLTokenizer:
        if self._prepared is None:
            backend = getattr(self._tokenizer, "backend_tokenizer", None)
            if backend is None or not self._eos_token_ids:
                missing = "fast tokenizer" if backend is None else "end-of-sequence token"
                raise RequestError(FIELD, f"this model has no {missing}, which it needs")
            self._prepared = LLTokenizer(
                backend.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids
            )
        return self._prepared


class GrammarConstraint:
    """A `Constraint` (`core/token_rules.py`) over a matcher, which walks trees by going back."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._matcher = matcher
        self._words = num_words(vocab_size)
        self._eos_token_ids = frozenset(eos_token_ids)

    def masks(self, tree: TokenTree) -> UInt32:
        """See `Constraint`."""
        masks = np.zeros((1 + len(tree), self._words), dtype=np.uint32)
        for node in self._walk(tree):
            row = masks[node + 1]
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return masks

    def accepts(self, tree: TokenTree) -> Bool:
        """See `Constraint`."""
        accepted = np.zeros(1 + len(tree), dtype=np.bool_)
        accepted[[node + 1 for node in self._walk(tree)]] = True
        return accepted[1:]

    def advance(self, token_ids: Sequence[int]) -> None:
        """See `Constraint`."""
        consumed = self._matcher.consume_tokens(list(token_ids))
        assert consumed, self._matcher.get_error()

    def _walk(self, tree: TokenTree) -> Iterator[int]:
        """The root and every accepted node, each while the matcher stands behind it."""
        children: list[list[int]] = [[] for _ in range(1 + len(tree))]
        for node, parent in enumerate(tree.parents.tolist()):
            children[parent + 1].append(node)
        return self._walk_below(ROOT, children, tree.tokens.tolist())

    def _walk_below(
        self, node: int, children: Sequence[Sequence[int]], tokens: Sequence[int]
    ) -> Iterator[int]:
        yield node
        for child in children[node + 1]:
            # Nothing follows the end.
            if tokens[child] in self._eos_token_ids:
                continue
            if self._matcher.try_consume_tokens([tokens[child]]):
                yield from self._walk_below(child, children, tokens)
                self._matcher.rollback(1)


def _grammar(output: StructuredOutput) -> str:
    match output.kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"})
        case "json":
            return LLMatcher.grammar_from_json_schema(_schema(output.value))
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(_json(output.value, "choice")))
        case "regex":
            return LLMatcher.grammar_from_regex(output.value)
        case "grammar":
            return LLMatcher.grammar_from_lark(output.value)


def _json(text: str, kind: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise RequestError(FIELD, f"{kind}: is not valid JSON: {error}") from None


def _schema(text: str) -> dict[str, Any]:
    schema = _json(text, "json")
    if not isinstance(schema, dict):
        raise RequestError(FIELD, "json: must be an object, the schema")
    return schema


def _choice(texts: object) -> str:
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise RequestError(FIELD, "choice: must be a list of texts")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
