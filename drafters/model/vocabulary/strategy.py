"""How a model drafter reads a request's text and what its draws are, by its vocabulary.

`SameVocabulary` is that of a model with the target's own tokens. `IntersectionVocabulary` is TLI's
(Timor et al., arXiv 2502.05202, Algorithm 4): draws are from the drafter's distribution over the
tokens that both have, renormalised, and the model reads a token outside of them in the tokens that
spell its bytes. `written.py` and `string_tree.py` have those that need no shared token.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple, Protocol

import numpy as np

from ....core.arrays import Float32, Int32
from ....core.errors import ConfigError
from ....core.proposals import DraftRequest
from ....models.stage.options import OutputVocabulary
from ...coupled_rank import CoupledChoice
from ..text_distribution import TextDistribution
from .surfaces import NO_ID, Speller, Vocabulary, VocabularyMap
from .target_noise import TargetNoise


class DraftText(Protocol):
    """The committed text of a request in the drafter's own tokens."""

    @property
    def tokens(self) -> list[int]:
        """The drafter's ids, which it feeds to its model."""
        ...

    def extend(self, committed: Sequence[int]) -> int:
        """Append committed target ids; returns how many of the tokens before stay as they were."""
        ...

    def behind(self, assumed: Sequence[int]) -> tuple[DraftText, int]:
        """The text with target ids behind it, and how many of its tokens stay as they are there.
        The text itself is left as it is."""
        ...


class DraftNodes(NamedTuple):
    """Tokens int32 [n], parents int32 [n] and log-probabilities float32 [n], as in `Proposal`."""

    tokens: Int32
    parents: Int32
    log_probs: Float32

    def first(self, max_nodes: int) -> DraftNodes:
        """At most so many of them, the first ones."""
        return DraftNodes(
            self.tokens[:max_nodes], self.parents[:max_nodes], self.log_probs[:max_nodes]
        )


class DraftVocabulary(Protocol):
    """What the tokens of a drafter's model have to do with the target's.

    size              ids that its model's logits are for
    draws_target_ids  whether draws are the target's ids, so that its noise and processors apply
    is_declared       whether what was drawn from can be told, as rules other than `coupled` ask
    """

    @property
    def size(self) -> int: ...  # noqa: D102 - see the class

    @property
    def draws_target_ids(self) -> bool: ...  # noqa: D102

    @property
    def is_declared(self) -> bool: ...  # noqa: D102

    def num_draws(self, num_tokens: int) -> int:
        """Draws that make about so many of the target's tokens."""
        ...

    def text(self, request: DraftRequest) -> DraftText:
        """The text of a request that opens, whose ids are known."""
        ...

    def knows(self, tokens: Int32) -> bool:
        """Whether all of these target ids can be read; an id without a row can end a process."""
        ...

    def fed(self, token: int) -> int:
        """The drafter's own id of a drawn token."""
        ...

    def distribution(self, request: DraftRequest) -> TextDistribution:
        """How the tokens after the request's text are drawn."""
        ...

    def target_noise(self, text: DraftText, choice: CoupledChoice) -> TargetNoise | None:
        """The noise that chooses the text's next tokens, where draws are no target ids and it says
        something of them."""
        ...

    def nodes(self, text: DraftText, drafted: DraftNodes) -> DraftNodes:
        """Drafted nodes behind `text` as nodes of the target's ids."""
        ...


class SameText:
    """A text whose tokens are the target's own."""

    __slots__ = ("tokens",)

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.tokens = list(token_ids)

    def extend(self, committed: Sequence[int]) -> int:
        """Append committed tokens; all tokens before stay as they were."""
        kept = len(self.tokens)
        self.tokens.extend(committed)
        return kept

    def behind(self, assumed: Sequence[int]) -> tuple[SameText, int]:
        """The text with these behind it; all tokens before stay as they are."""
        return SameText([*self.tokens, *assumed]), len(self.tokens)


class TargetIds:
    """What vocabularies whose draws are target ids have in common."""

    draws_target_ids = True
    is_declared = True

    def __init__(self, size: int) -> None:
        self.size = size

    def num_draws(self, num_tokens: int) -> int:
        """A draw is a token."""
        return num_tokens

    def knows(self, tokens: Int32) -> bool:
        """Whether all are ids of the target's vocabulary."""
        return bool(np.all((tokens >= 0) & (tokens < self.size)))

    def distribution(self, request: DraftRequest) -> TextDistribution:
        """The request's own parameters and noise."""
        return TextDistribution.of(request, self.size)

    def target_noise(self, text: DraftText, choice: CoupledChoice) -> None:
        """Nothing beside: the ids' own noise is that of the draws."""

    def nodes(self, text: DraftText, drafted: DraftNodes) -> DraftNodes:  # noqa: ARG002
        """The nodes as they are."""
        return drafted


class SameVocabulary(TargetIds):
    """The target's own tokens, of which the model has the first `size`."""

    def text(self, request: DraftRequest) -> SameText:
        """The text of a request that opens."""
        return SameText(request.token_ids.tolist())

    def fed(self, token: int) -> int:
        """The id itself."""
        return token


class Translation:
    """The drafter's tokens for each of the target's, made when they are first asked for."""

    __slots__ = ("_draft", "_known", "_map", "_speller", "_target")

    def __init__(self, shared: VocabularyMap, draft: Vocabulary, target: Vocabulary) -> None:
        self._map = shared
        self._draft = draft
        self._target = target
        self._speller = Speller(draft)
        self._known: dict[int, tuple[int, ...]] = {}

    def of(self, token: int) -> tuple[int, ...]:
        """The drafter's tokens for one of the target's; none for one that writes no text."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = self._made(token)
        return known

    def _made(self, token: int) -> tuple[int, ...]:
        roles = special_ids(token, self._draft, self._target)
        if roles:
            return roles
        own = int(self._map.to_draft[token])
        return (own,) if own != NO_ID else self._speller.spell(self._target.surface(token))


def special_ids(token: int, draft: Vocabulary, target: Vocabulary) -> tuple[int, ...]:
    """The drafter's tokens that end and begin a text where this one of the target's does."""
    pairs = ((target.end, draft.end), (target.begin, draft.begin))
    return tuple(own for role, own in pairs if role == token and own is not None)


class MappedText:
    """A text in the drafter's tokens, target id by target id."""

    __slots__ = ("_translation", "tokens")

    def __init__(self, translation: Translation, token_ids: Sequence[int]) -> None:
        self._translation = translation
        self.tokens: list[int] = []
        self.extend(token_ids)

    def extend(self, committed: Sequence[int]) -> int:
        """Append committed target ids; all tokens before stay as they were."""
        kept = len(self.tokens)
        for token in committed:
            self.tokens.extend(self._translation.of(token))
        return kept

    def behind(self, assumed: Sequence[int]) -> tuple[MappedText, int]:
        """The text with target ids behind it; all tokens before stay as they are."""
        text = copy(self)
        text.tokens = list(self.tokens)
        return text, text.extend(assumed)


class IntersectionVocabulary(TargetIds):
    """Draws are target ids of the intersection."""

    def __init__(self, shared: VocabularyMap, draft: Vocabulary, target: Vocabulary) -> None:
        """Raises `ConfigError` where nothing is shared."""
        if not shared.num_shared:
            raise ConfigError("vocabulary", "tli needs shared tokens; take slem")
        super().__init__(len(shared.to_draft))
        self._map = shared
        self._translation = Translation(shared, draft, target)

    @property
    def output(self) -> OutputVocabulary:
        """The ids that the model's logits are for."""
        return OutputVocabulary(self._map.draft_ids, self._map.target_ids, self.size)

    def text(self, request: DraftRequest) -> DraftText:
        """The text of a request that opens."""
        return MappedText(self._translation, request.token_ids.tolist())

    def fed(self, token: int) -> int:
        """The drafter's own id of a drawn token."""
        return int(self._map.to_draft[token])
