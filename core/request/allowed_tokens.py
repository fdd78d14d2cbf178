"""Which tokens a request may take, node by node: lists and sequences of tokens, a least length
and a grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import ROOT, Bool, UInt32
from ..logits_params import LogitsParams
from ..tree.tree import TokenTree
from .banned_sequences import BannedSequences
from .constraint import Constraint, TreeForm
from .token_mask import contains, full_mask, mask_of

FIRST = np.zeros(1, dtype=np.int32)
EVERY = ~np.uint32(0)


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
        form: UInt32 | None = None,
    ) -> UInt32 | None:
        """uint32 [1 or 1 + nodes, words]: the tokens allowed after the root and after each node.

        None where all are. `num_answered` tokens of the answer are committed, of which `answered`
        are the last `lookback` or more; `form` uint32 [1 + nodes, words] is what the constraint
        allows, where there is one. Where two rules leave nothing together, a form goes before a
        list of tokens, both before sequences, and all before a least length.
        """
        mask = None if self.always is None else self.always[None]
        if form is not None:
            mask = form if mask is None else _both(form, mask)
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
        form: TreeForm | None = None,
    ) -> Bool:
        """bool [nodes]: whether a node and all above it may be chosen; see `TreeForm.accepted`."""
        if (
            form is not None
            and self.always is None
            and self.sequences is None
            and self._early_ends(num_answered) is None
        ):
            return form.accepted
        masks = self.masks(tree, num_answered, answered, None if form is None else form.masks)
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
