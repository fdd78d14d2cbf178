"""What a recorded target predicts after any text: what it said there, or after the like."""

from __future__ import annotations

from collections.abc import Sequence

from .recording import RecordedAnswer, off_text
from .row_contexts import RowContext

Ids = tuple[int, ...]
# Ends of contexts that are looked up, in tokens.
MAX_END = 6


class Predictions:
    """The most probable next tokens, best first, that a recording has or suggests."""

    __slots__ = ("_after_ends", "_off_text", "_on_text", "_prompt_lens", "_texts")  # fmt: skip

    def __init__(self, answers: Sequence[RecordedAnswer]) -> None:
        self._texts = {answer.seed: answer.text_ids for answer in answers}
        self._prompt_lens = {answer.seed: len(answer.prompt_ids) for answer in answers}
        self._on_text = {answer.seed: answer.top_next_tokens for answer in answers}
        self._off_text = {
            (answer.seed, one.start, one.tokens): one.ids
            for answer in answers
            for one in answer.off_text
        }
        self._after_ends: dict[Ids, Ids] = {}
        for answer in answers:
            self._learn(answer)

    def after(self, context: RowContext) -> Ids:
        """Exact where the recording has the whole context; empty if it has nothing like it."""
        seed = context.seed
        text = self._texts.get(seed, ())
        start, tokens = off_text(text, context.start, context.tokens)
        if tokens:
            said = self._off_text.get((seed, start, tokens))
        else:
            index = start - self._prompt_lens[seed]
            said = self._on_text[seed][index] if index < len(self._on_text[seed]) else None
        if said is not None:
            return said
        end = (text[max(0, start - MAX_END) : start] + tokens)[-MAX_END:]
        for first in range(len(end)):
            if (found := self._after_ends.get(end[first:])) is not None:
                return found
        return ()

    def _learn(self, answer: RecordedAnswer) -> None:
        text = answer.text_ids
        for place, ids in enumerate(answer.top_next_tokens, len(answer.prompt_ids)):
            self._learn_ends(text[max(0, place - MAX_END) : place], ids)
        for one in answer.off_text:
            before = text[max(0, one.start - MAX_END) : one.start]
            self._learn_ends((before + one.tokens)[-MAX_END:], one.ids)

    def _learn_ends(self, context: Ids, ids: Ids) -> None:
        for first in range(len(context)):
            known = self._after_ends.get(context[first:], ())
            if len(ids) >= len(known):
                self._after_ends[context[first:]] = ids
