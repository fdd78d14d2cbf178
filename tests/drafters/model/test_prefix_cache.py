"""Requests whose texts begin alike share a model drafter's KV: the drafts stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftline.core.proposals import Commit, DraftRequest, Proposal, Query
from draftline.drafters.model.drafter import ModelDrafter, load_model_drafter
from draftline.drafters.model.options import ModelOptions
from draftline.drafters.model.vocabulary.strategy import DraftVocabulary
from draftline.drafters.model.vocabulary.written import WrittenVocabulary
from draftline.models.load.model_info import ModelInfo
from support.fakes.fake_model_stage import FakeModelStage
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from support.tools.tiny_tokenizers import letters

VOCAB, SEED = 6, 12
INFO = ModelInfo(Path(), "fake", VOCAB, 8, 1, 1, 8, 4096, (), None)
PROMPT = [3, 1, 4, 1, 5, 2, 2, 0, 3, 5, 1, 1]


def fake(vocabulary: DraftVocabulary | None = None, **options: Any) -> ModelDrafter:
    stage: Any = FakeModelStage(VOCAB, block_size=4)
    chosen = ModelOptions(**{"block_size": 4, "num_blocks": 40, **options})
    return ModelDrafter(stage, INFO, options=chosen, vocabulary=vocabulary)


def begin(
    drafter: ModelDrafter, name: str, text: list[int], *,
    namespace: str = "shared", salt: str = "", temperature: float = 0.0,
) -> Proposal:  # fmt: skip
    ids = np.array(text, dtype=np.int32)
    drafter.open(
        DraftRequest(
            name, ids, len(text), temperature, SEED, namespace=namespace, cache_salt=salt
        )
    )  # fmt: skip
    [proposal] = drafter.propose([Query(name, len(text), 8)])
    return proposal


def rows_of(drafter: ModelDrafter) -> list[int]:
    """Rows of each pass since it was last asked."""
    stage: Any = drafter._stage
    rows = [len(step.token_ids) for step in stage.steps]
    stage.steps.clear()
    return rows


def test_what_another_request_has_computed_is_not_computed_again() -> None:
    drafter = fake()
    begin(drafter, "a", PROMPT)
    assert rows_of(drafter)[0] == len(PROMPT)
    # Two whole blocks are equal; the third ends with another token.
    begin(drafter, "b", [*PROMPT[:11], 2, 3])
    assert rows_of(drafter)[0] == 13 - 8
    assert drafter.prefix_counts == (12 + 13, 8)


def test_blocks_of_ended_requests_are_kept_until_their_room_is_needed() -> None:
    drafter = fake(num_blocks=8)
    begin(drafter, "a", PROMPT)
    drafter.close("a")
    assert drafter._cache.num_free == 8
    begin(drafter, "b", PROMPT)
    assert rows_of(drafter)[-4] == len(PROMPT) - 8
    drafter.close("b")
    begin(drafter, "c", [0] * 24)
    drafter.close("c")
    rows_of(drafter)
    begin(drafter, "d", PROMPT)
    assert rows_of(drafter)[0] > len(PROMPT) - 8, "its blocks were taken, the last ones first"
    drafter._cache.check()


@pytest.mark.parametrize("other", [{"namespace": "rival"}, {"salt": "s"}])
def test_tenants_share_nothing(other: dict[str, Any]) -> None:
    drafter = fake()
    begin(drafter, "a", PROMPT, namespace="own")
    rows_of(drafter)
    begin(drafter, "b", PROMPT, **{"namespace": "own", **other})
    assert rows_of(drafter)[0] == len(PROMPT)
    assert drafter.prefix_counts.hits == 0
    begin(drafter, "c", PROMPT, namespace="own")
    assert rows_of(drafter)[0] == len(PROMPT) - 8


def written() -> DraftVocabulary:
    return WrittenVocabulary(
        letters("a", "b", "c", "ab", "cab"), letters("a", "b", "c", "ca", "bc"), VOCAB, VOCAB
    )


class Lives:
    """Lives of random requests at two drafters, with a cache and without, draft by draft."""

    def __init__(self, make: Callable[[bool], ModelDrafter], size: int, seed: int) -> None:
        self.cached, self.plain = self.both = make(True), make(False)
        self._size = size
        self._rng = np.random.default_rng(seed)
        self._bases = [self._rng.integers(0, size, 30).tolist() for _ in range(2)]
        self._texts: dict[str, list[int]] = {}

    def run(self, num_rounds: int) -> int:
        """The tokens that were found in the cache."""
        for number in range(num_rounds):
            if len(self._texts) < 4 and self._rng.random() < 0.5:
                self._open(f"r{number}")
            for name, drafted in self._drafts().items():
                self._commit(name, drafted)
                if self._rng.random() < 0.15:
                    self._close(name)
            self.cached._cache.check()
        assert self.plain.prefix_counts.hits == 0
        return self.cached.prefix_counts.hits

    def _open(self, name: str) -> None:
        rng = self._rng
        base, tail = self._bases[rng.integers(2)], rng.integers(0, self._size, rng.integers(3))
        text = [*base[: rng.integers(1, 30)], *tail.tolist()]
        ids, tenant = np.array(text, dtype=np.int32), str(rng.choice(["x", "y"]))
        temperature = float(rng.choice([0.0, 0.9]))
        for drafter in self.both:
            drafter.open(DraftRequest(name, ids, len(ids), temperature, SEED, namespace=tenant))
        self._texts[name] = text

    def _drafts(self) -> dict[str, list[int]]:
        chosen = [name for name in self._texts if self._rng.random() < 0.8]
        queries = [Query(name, len(self._texts[name]), 6) for name in chosen]
        drafts = [drafter.propose(queries) for drafter in self.both]
        for one, other in zip(*drafts, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.parents.tolist() == other.parents.tolist()
            np.testing.assert_array_equal(one.log_probs, other.log_probs)
        return {name: draft.tokens.tolist() for name, draft in zip(chosen, drafts[0], strict=True)}

    def _commit(self, name: str, drafted: list[int]) -> None:
        accepted = drafted[: self._rng.integers(0, len(drafted) + 1)]
        tokens = [*accepted, int(self._rng.integers(self._size))]
        for drafter in self.both:
            ids = np.array(tokens, dtype=np.int32)
            drafter.observe([Commit(name, len(self._texts[name]), ids)])
        self._texts[name] += tokens

    def _close(self, name: str) -> None:
        for drafter in self.both:
            drafter.close(name)
        del self._texts[name]


def shared_or_not(drafter: ModelDrafter, is_shared: bool) -> ModelDrafter:
    """The drafter; its texts begin without cached blocks unless they are shared."""
    if not is_shared:
        drafter._cache._share = lambda _: None  # type: ignore[method-assign]
    return drafter


@pytest.mark.parametrize("seed", range(4))
def test_drafts_are_the_same_with_and_without(seed: int) -> None:
    def make(is_shared: bool) -> ModelDrafter:
        # Blocks of ended requests have to go, but no open one is without.
        return shared_or_not(fake(num_blocks=100, prefill_chunk=7), is_shared)

    assert Lives(make, VOCAB, seed).run(60) > 0


@pytest.mark.parametrize("seed", range(4))
def test_texts_that_are_written_anew_change_no_block_of_others(seed: int) -> None:
    def make(is_shared: bool) -> ModelDrafter:
        return shared_or_not(fake(written(), num_blocks=400, block_size=4), is_shared)

    assert Lives(make, 5, seed).run(60) > 0


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_drafts_of_a_model_are_the_same_with_and_without(tree: str, tmp_path: Path) -> None:
    checkpoint = save_tiny_model("llama", tmp_path)

    def make(is_shared: bool) -> ModelDrafter:
        options = ModelOptions(tree=tree, block_size=4, device="cpu")
        return shared_or_not(load_model_drafter(checkpoint, options=options), is_shared)

    assert Lives(make, VOCAB_SIZE, 3).run(24) > 0
