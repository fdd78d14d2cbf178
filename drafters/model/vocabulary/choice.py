"""Which way a model of another tokenizer drafts, and what is to be expected of each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ....core.errors import ConfigError
from ....models.load.model_info import ModelInfo
from ....models.stage.options import OutputVocabulary
from ....models.text.fingerprint import tokenizer_hash
from .strategy import DraftVocabulary, IntersectionVocabulary, SameVocabulary
from .string_tree import StringVocabulary
from .surfaces import Vocabulary, VocabularyMap, map_vocabularies, read_vocabulary
from .written import WrittenVocabulary, num_draws

VOCABULARY_AUTO, SAME, SLEM, TLI, SLRS = "auto", "same", "slem", "tli", "slrs"
VOCABULARIES = (VOCABULARY_AUTO, SAME, SLEM, TLI, SLRS)
logger = logging.getLogger(__name__)
# A draft over the intersection ends, on average, at the first token outside it.
LEAST_COVERAGE = 0.75
SAMPLE = '''The committee met on Monday to discuss next year's budget. "We can't promise anything,"
she said, "but 25% of the costs could be saved." Nobody had expected the results of 1998 to matter.

def read_lines(path: str, limit: int = 100) -> list[str]:
    """Return at most `limit` lines of a file, without their ends."""
    lines = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file):
            if number >= limit:
                break
            lines.append(line.rstrip("\\n"))
    return lines
'''


def check_tree(vocabulary: str, tree: str) -> None:
    """Raise `ConfigError` where drafts of this kind are no trees of this kind."""
    if vocabulary == SLRS and tree != "chain":
        raise ConfigError("tree", f"must be chain where vocabulary is {vocabulary}, not {tree}")
    if vocabulary == SLEM and tree == "sequoia":
        raise ConfigError(
            "tree", "sequoia learns by rank, and texts have none: vocabulary slem takes dynamic"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """Two vocabularies side by side.

    coverage         share of the target's tokens of a sample of English and Python that both have
    draws_per_token  tokens of the drafter that write one of the target's there
    """

    shared: VocabularyMap
    coverage: float
    draws_per_token: float

    @property
    def best(self) -> str:
        """What `auto` takes: shared tokens where most of a text is made of them."""
        return TLI if self.coverage >= LEAST_COVERAGE else SLEM

    def describe(self, num_tokens: int) -> Iterator[str]:
        """What is shared, and how much a draft of `num_tokens` tokens can bring at most."""
        yield self.shared.describe()
        whole = sum(self.coverage**depth for depth in range(1, num_tokens + 1))
        yield (
            f"tli: {self.coverage:.0%} of a sample text is in both, so that {num_tokens} passes "
            f"bring at most {whole:.1f} tokens; they know the request's noise and penalties"
        )
        yield (
            f"slem: {num_draws(num_tokens, self.draws_per_token)} passes write {num_tokens} "
            "tokens, whatever is in both; they know its noise by what they become"
        )


@dataclass(frozen=True, slots=True, eq=False)
class ChosenVocabulary:
    """How a drafter drafts.

    output  ids that its logits are for; None: its own
    """

    name: str
    vocabulary: DraftVocabulary
    output: OutputVocabulary | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    draft: Vocabulary
    target: Vocabulary
    draft_size: int
    target_size: int

    def shared(self) -> VocabularyMap:
        return map_vocabularies(self.draft, self.target, self.draft_size, self.target_size)

    def overlap(self) -> Overlap:
        shared = self.shared()
        target_ids = self.target.encode(SAMPLE)
        known = [token in shared.target_ids for token in target_ids]
        length = max(len(target_ids), 1)
        return Overlap(shared, sum(known) / length, len(self.draft.encode(SAMPLE)) / length)


def read_overlap(draft: ModelInfo, target: ModelInfo) -> Overlap | None:
    """What the tokenizers of two models share; None where they are the same.

    Raises `CheckpointError`.
    """
    if has_same_tokenizer(draft.path, target.path):
        return None
    return _pair(draft, target).overlap()


def has_same_tokenizer(draft: Path, target: Path) -> bool:
    """Whether every token id means the same in both folders. Raises `CheckpointError`."""
    return tokenizer_hash(draft) == tokenizer_hash(target)


def _pair(draft: ModelInfo, target: ModelInfo) -> _Pair:
    return _Pair(
        read_vocabulary(draft.path, draft.vocab_size),
        read_vocabulary(target.path, target.vocab_size),
        draft.vocab_size,
        target.vocab_size,
    )


def choose_vocabulary(
    option: str, draft: ModelInfo, target: ModelInfo | None, num_tokens: int
) -> ChosenVocabulary:
    """The drafter's way of drafting by its option `vocabulary`; `auto` says what it picks and why.

    target      of unknown tokenizer where it is None: the drafter's is taken to be the same
    num_tokens  draws of a draft

    Raises `ConfigError`, `CheckpointError`.
    """
    if target is None or has_same_tokenizer(draft.path, target.path):
        return ChosenVocabulary(SAME, SameVocabulary(draft.vocab_size))
    if option == SAME:
        raise ConfigError(
            "vocabulary",
            f"{draft.path.name} has another tokenizer than the served model; take auto, tli or "
            "slem",
        )
    pair = _pair(draft, target)
    overlap = pair.overlap()
    if option == VOCABULARY_AUTO:
        option = overlap.best
        for line in overlap.describe(num_tokens):
            logger.info("drafter=%s %s", draft.path.name, line)
        logger.info("drafter=%s vocabulary=%s", draft.path.name, option)
    return _made(option, pair, overlap)


def _made(name: str, pair: _Pair, overlap: Overlap) -> ChosenVocabulary:
    if name == SLEM:
        return ChosenVocabulary(
            name,
            WrittenVocabulary(
                pair.draft,
                pair.target,
                pair.draft_size,
                pair.target_size,
                overlap.draws_per_token,
            ),
        )
    if name == SLRS:
        return ChosenVocabulary(
            name,
            StringVocabulary(pair.draft, pair.target, pair.draft_size, pair.target_size),
        )
    vocabulary = IntersectionVocabulary(overlap.shared, pair.draft, pair.target)
    return ChosenVocabulary(name, vocabulary, vocabulary.output)
