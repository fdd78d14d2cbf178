"""The tokens that a request may choose: lists, banned sequences, and what its grammar allows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import numpy as np

from ..arrays import ROOT, Bool, UInt32
from ..errors import RequestError
from ..proposals import LogitsParams
from ..tree.tree import TokenTree

Kind = Literal["json_object", "json", "regex", "choice", "grammar"]


@dataclass(frozen=True, slots=True, eq=False)
class GrammarMasks:
    """What a grammar allows after a root and after the nodes of a tree.

    accepted  bool [nodes]  whether a node and all above it fit the grammar, and may go on. Masks
              may allow only one of several spellings of a text: a node that is accepted here and
              forbidden there is a wasted row. An end is not accepted; it comes as the bonus token
    masks     uint32 [1 + nodes, words]  the tokens allowed after the root and after each node;
              rows of nodes that are not accepted mean nothing
    """

    accepted: Bool
    masks: UInt32


class Constraint(Protocol):
    """A grammar that an answer must follow; one object a request, which follows its answer.

    Masks may take long, so they are computed elsewhere. At most one `follow` is under way.
    """

    @property
    def first(self) -> UInt32:
        """uint32 [words]: the tokens that may begin the answer."""
        ...

    def follow(self, tree: TokenTree) -> Future[GrammarMasks]:
        """What is allowed after the committed tokens and after the nodes of `tree`.

        The future raises `RequestError` where the grammar cannot be followed within its limits.
        """
        ...

    def advance(self, token_ids: Sequence[int]) -> None:
        """Tokens were committed; they are allowed. Does not wait."""
        ...

    def close(self) -> None:
        """Free what follows the answer, for the request has ended. May be called twice."""
        ...


def rows_in(tree: TokenTree, whole: TokenTree) -> list[int]:
    """Where the root and the nodes of `tree` stand among those of `whole`, which it was cut from.

    Rows: 0 is the root, node i is i + 1.
    """
    edges = zip(whole.parents.tolist(), whole.tokens.tolist(), strict=True)
    row_of = {(parent + 1, token): node + 1 for node, (parent, token) in enumerate(edges)}
    rows = [ROOT + 1]
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        rows.append(row_of[rows[parent + 1], token])
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutput:
    """What an answer must match, whole.

    kind   json_object: any JSON object; json: a JSON schema; regex; choice: one of some texts;
           grammar: a context-free grammar in Lark's syntax
    value  the schema as JSON, the expression, the texts as a JSON list, or the grammar
    field  the name of the request's field that asked for it, for errors

    Raises `RequestError`; whether the value can be used is checked with the model's tokenizer.
    """

    kind: Kind
    value: str = ""
    field: str = "structured_outputs"

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            known = ", ".join(get_args(Kind))
            raise RequestError("structured_outputs", f"{self.kind!r} is unknown; known: {known}")
        if self.kind != "json_object" and not self.value:
            raise RequestError("structured_outputs", f"{self.kind} must not be empty")


FIRST = np.zeros(1, dtype=np.int32)
EVERY = ~np.uint32(0)
WORD = np.dtype("<u4")


@dataclass(frozen=True, slots=True, eq=False)
class AllowedTokens:
    """The tokens that a request may choose, whatever its temperature and filters are.

    always      uint32 [words]  tokens that may be chosen; None: all
    ends        uint32 [words]  tokens that end the answer; None: they are always allowed
    min_tokens  length of the answer below which `ends` may not be chosen
    constraint  the structured output, which follows the answer; None: none
    sequences   token sequences that the answer may not hold; None: none
    """

    always: UInt32 | None
    ends: UInt32 | None
    min_tokens: int
    constraint: Constraint | None
    sequences: BannedSequences | None = None

    @property
    def lookback(self) -> int:
        """Tokens of the answer that `masks` and `allowed` need to see."""
        return 0 if self.sequences is None else self.sequences.lookback

    def masks(
        self,
        tree: TokenTree,
        num_answered: int,
        answered: Sequence[int] = (),
        grammar_masks: UInt32 | None = None,
    ) -> UInt32 | None:
        """uint32 [1 or 1 + nodes, words]: the tokens allowed after the root and after each node.

        None where all are. `num_answered` tokens of the answer are committed, of which `answered`
        are the last `lookback` or more; `grammar_masks` uint32 [1 + nodes, words] are those of
        the constraint, if any. Where two rules leave nothing together, a grammar goes before a list
        of tokens, both before sequences, and all before a least length.
        """
        mask = None if self.always is None else self.always[None]
        if grammar_masks is not None:
            mask = grammar_masks if mask is None else _both(grammar_masks, mask)
        if self.sequences is not None:
            mask = _together(mask, self.sequences.masks(tree, answered))
        ends = self._early_ends(num_answered)
        if ends is None:
            return mask
        lengths = num_answered + np.concatenate([FIRST, tree.depths])
        longer = np.where((lengths < self.min_tokens)[:, None], ~ends, EVERY)
        return _together(mask, longer)

    def allowed(
        self,
        tree: TokenTree,
        num_answered: int,
        answered: Sequence[int] = (),
        grammar: GrammarMasks | None = None,
    ) -> Bool:
        """bool [nodes]: whether a node and all above it may be chosen (`GrammarMasks.accepted`)."""
        if (
            grammar is not None
            and self.always is None
            and self.sequences is None
            and self._early_ends(num_answered) is None
        ):
            return grammar.accepted
        own = None if grammar is None else grammar.masks
        masks = self.masks(tree, num_answered, answered, own)
        allowed = np.ones(len(tree), dtype=np.bool_)
        if masks is None or not len(tree):
            return allowed
        rows = np.broadcast_to(masks, (1 + len(tree), masks.shape[1]))[tree.parents + 1]
        allowed &= contains(rows, tree.tokens)
        for node, parent in enumerate(tree.parents.tolist()):
            if parent != ROOT and not allowed[parent]:
                allowed[node] = False
        return allowed

    def advance(self, token_ids: Sequence[int]) -> None:
        """Tokens were committed, and the answer goes on."""
        if self.constraint is not None:
            self.constraint.advance(token_ids)

    def _early_ends(self, num_answered: int) -> UInt32 | None:
        """Tokens that the least length forbids still."""
        return self.ends if num_answered < self.min_tokens else None


def allowed_tokens_of(
    logits_params: LogitsParams,
    end_ids: Iterable[int],
    vocab_size: int,
    constraint: Constraint | None = None,
    sequences: BannedSequences | None = None,
) -> AllowedTokens | None:
    """The rules of a request whose answer ends with `end_ids`; None: all tokens may be chosen.

    Ids outside the vocabulary are left out.
    """
    allowed, banned = logits_params.allowed_token_ids, logits_params.banned_token_ids
    always = ends = None
    if allowed is not None or banned:
        always = full_mask(vocab_size) if allowed is None else mask_of(allowed, vocab_size)
        always &= ~mask_of(banned, vocab_size)
    if logits_params.min_tokens:
        ends = mask_of(end_ids, vocab_size)
    if always is None and ends is None and constraint is None and sequences is None:
        return None
    return AllowedTokens(always, ends, logits_params.min_tokens, constraint, sequences)


def _together(first: UInt32 | None, second: UInt32 | None) -> UInt32 | None:
    """As `_both`; None allows everything."""
    if first is None or second is None:
        return second if first is None else first
    return _both(first, second)


def _both(first: UInt32, second: UInt32) -> UInt32:
    """What both allow; where that is nothing, what the first does."""
    both = first & second
    return np.where(both.any(axis=1, keepdims=True), both, first)


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> UInt32:
    """uint32 [words] with the bits of these tokens; ids outside the vocabulary are left out."""
    ids = np.fromiter(token_ids, dtype=np.int64)
    allowed = np.zeros(num_words(vocab_size) * 32, dtype=np.bool_)
    allowed[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return np.packbits(allowed, bitorder="little").view(WORD).astype(np.uint32)


def full_mask(vocab_size: int) -> UInt32:
    """uint32 [words] with the bits of all tokens."""
    return mask_of(range(vocab_size), vocab_size)


def unpack(mask: UInt32, vocab_size: int) -> Bool:
    """bool [rows, vocabulary] of a mask uint32 [rows, words]."""
    data = mask.astype(WORD, copy=False).view(np.uint8)
    return np.unpackbits(data, axis=-1, count=vocab_size, bitorder="little").view(np.bool_)


def contains(mask: UInt32, token_ids: np.ndarray) -> Bool:
    """bool [n]: whether row i of `mask` [n, words] has token i."""
    words = mask[np.arange(len(token_ids)), token_ids >> 5]
    return ((words >> (token_ids & 31).astype(np.uint32)) & np.uint32(1)).astype(np.bool_)


class BannedSequences:
    """Forbids the last token of a sequence wherever the answer ends with the tokens before it.

    What a row forbids depends on the answer that it follows alone, so on nothing that was drafted
    beside it. A sequence that begins in the prompt does not count.
    """

    __slots__ = ("_allowed_after", "_lengths", "_num_words")

    def __init__(self, sequences: Iterable[Sequence[int]], vocab_size: int) -> None:
        """`sequences` are not empty; those with a token outside the vocabulary cannot come."""
        last: dict[tuple[int, ...], set[int]] = {}
        for sequence in sequences:
            *before, end = sequence
            if all(0 <= token < vocab_size for token in sequence):
                last.setdefault(tuple(before), set()).add(end)
        self._allowed_after = {before: ~mask_of(ends, vocab_size) for before, ends in last.items()}
        self._lengths = sorted({len(before) for before in last})
        self._num_words = num_words(vocab_size)

    @property
    def lookback(self) -> int:
        """Tokens before a row that decide what it forbids."""
        return max(self._lengths, default=0)

    def masks(self, tree: TokenTree, answered: Sequence[int]) -> UInt32 | None:
        """uint32 [1 + nodes, words]: the tokens allowed after the root and after each node.

        None where all are. `answered` are the committed tokens of the answer, or the last
        `lookback` of them.
        """
        found: dict[int, UInt32] = {}
        for row, text in enumerate(self._texts(tree, answered)):
            for length in self._lengths:
                before = text[len(text) - length :] if length <= len(text) else None
                allowed = None if before is None else self._allowed_after.get(before)
                if allowed is not None:
                    found[row] = found[row] & allowed if row in found else allowed
        if not found:
            return None
        masks = np.full((1 + len(tree), self._num_words), EVERY, dtype=np.uint32)
        for row, allowed in found.items():
            masks[row] = allowed
        return masks

    def _texts(self, tree: TokenTree, answered: Sequence[int]) -> list[tuple[int, ...]]:
        """The last tokens before each row: those of the answer and of the row's path."""
        most = self.lookback
        root = tuple(answered[max(len(answered) - most, 0) :])
        texts: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
            text = (*(root if parent == ROOT else texts[parent]), token)
            texts.append(text[max(len(text) - most, 0) :])
        return [root, *texts]
