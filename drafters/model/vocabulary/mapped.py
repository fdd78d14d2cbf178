"""Drafting in the tokens that both vocabularies have, by a model of another vocabulary.

TLI (Timor et al., arXiv 2502.05202, Algorithm 4) draws from the drafter's distribution over the
intersection, renormalised; the union (Algorithm 1) draws from all of the drafter's tokens, and a
token that the target lacks is always rejected. The model reads every committed token: one outside
the intersection in the tokens that spell its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import numpy as np

from ....core.arrays import Int64
from ....core.errors import ConfigError
from ....core.proposals import DraftRequest
from ....models.stage.output_vocabulary import OutputVocabulary
from ..text_distribution import DraftDistribution
from .overlap import NO_ID, VocabularyMap
from .own_chat import NO_PROMPT, OwnChat, OwnPrompt, own_prompt
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
    """A text in the drafter's tokens, target id by target id; a chat's prompt by its template."""

    __slots__ = ("_translation", "tokens")

    def __init__(
        self, translation: Translation, token_ids: Sequence[int], prompt: OwnPrompt = NO_PROMPT
    ) -> None:
        self._translation = translation
        self.tokens = list(prompt.tokens)
        self.extend(token_ids[prompt.num_target :])

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

    def __init__(
        self, shared: VocabularyMap, draft: Vocabulary, target: Vocabulary,
        chat: OwnChat | None = None,
    ) -> None:  # fmt: skip
        """Raises `ConfigError` where nothing is shared. `chat` makes prompts of chats."""
        if not shared.num_shared:
            raise ConfigError("vocabulary", "tli and union need shared tokens; take slem")
        super().__init__(len(shared.to_draft), len(shared.to_draft))
        self._map = shared
        self._chat = chat
        self.reads_chat = chat is not None
        self._translation = Translation(shared, draft, target)

    @property
    def output(self) -> OutputVocabulary:
        """The ids that the model's logits are for."""
        return OutputVocabulary(self._map.draft_ids, self._map.target_ids, self.size)

    def text(self, request: DraftRequest) -> DraftText:
        """The text of a request that opens."""
        prompt = own_prompt(self._chat, request)
        return MappedText(self._translation, request.token_ids.tolist(), prompt)

    def fed(self, token: int) -> int:
        """The drafter's own id of a drawn token."""
        return int(self._map.to_draft[token])


class UnionVocabulary(IntersectionVocabulary):
    """Draws are tokens of either vocabulary; those of the drafter alone have ids of their own
    behind the target's.

    Where a rule asks what was drawn from, one target id that the drafter never draws stands for all
    of them: it has their probability together, so that the rule stays exact.
    """

    def __init__(
        self, shared: VocabularyMap, draft: Vocabulary, target: Vocabulary,
        chat: OwnChat | None = None,
    ) -> None:  # fmt: skip
        """Raises `ConfigError` where nothing is shared, or the drafter has all target ids."""
        super().__init__(shared, draft, target, chat)
        unshared = np.flatnonzero(shared.to_draft == NO_ID)
        self._outside: Int64 = shared.outside
        if len(self._outside) and not len(unshared):
            raise ConfigError("vocabulary", "the drafter has all of the target's tokens; take tli")
        self._stand_in = int(unshared[-1]) if len(unshared) else NO_ID
        self.size = self.first_foreign + len(self._outside)

    @property
    def output(self) -> OutputVocabulary:
        """The ids that the model's logits are for."""
        return OutputVocabulary(
            np.concatenate([self._map.draft_ids, self._outside]),
            np.concatenate([self._map.target_ids, np.arange(self.first_foreign, self.size)]),
            self.size,
        )

    def fed(self, token: int) -> int:
        """The drafter's own id of a drawn token."""
        outside = token - self.first_foreign
        return int(self._outside[outside]) if outside >= 0 else super().fed(token)

    def foreign(self, token: int) -> int | None:
        """The id that stands for a token of the drafter alone."""
        return self._stand_in if token >= self.first_foreign else None

    def declared(self, distribution: DraftDistribution) -> DraftDistribution:
        """What was drawn from, with the probability of all foreign tokens at one id."""
        ids, probs = distribution
        foreign = ids >= self.first_foreign
        if not foreign.any():
            return distribution
        first = int(np.argmax(foreign))
        together = np.where(foreign, np.float32(0), probs)
        together[first] = probs[foreign].sum()
        return DraftDistribution(np.where(foreign, self._stand_in, ids).astype(np.int32), together)
