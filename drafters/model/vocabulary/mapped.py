"""Drafting in the tokens that both vocabularies have, by a model of another vocabulary.

TLI (Timor et al., arXiv 2502.05202, Algorithm 4) draws from the drafter's distribution over the
intersection, renormalised. The model reads every committed token: one outside the intersection in
the tokens that spell its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from ....core.errors import ConfigError
from ....core.proposals import DraftRequest
from ....models.stage.options import OutputVocabulary
from .overlap import NO_ID, VocabularyMap
from .strategy import DraftText, TargetIds
from .surfaces import Speller, Vocabulary


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
