"""Models of other tokenizers behind paths of target tokens, some of which go on within words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draftline.core.proposals import Commit, DraftRequest, Proposal, Query
from draftline.drafters.model.drafter import ModelDrafter, load_model_drafter
from draftline.drafters.model.options import ModelOptions
from draftline.models.load.model_info import read_model_info
from draftline.models.text.tokenizer import load_tokenizer

KINDS: dict[str, dict[str, Any]] = {
    "tli": {"vocabulary": "tli"},
    "tli, declared": {"vocabulary": "tli", "distribution_size": 8},
    "slem": {"vocabulary": "slem"},
    "slem, tree": {"vocabulary": "slem", "tree": "dynamic", "num_tokens": 3},
    "slrs": {"model": "demo-drafter-bytes", "vocabulary": "slrs", "num_blocks": 1024},
    "same": {"model": "demo-drafter"},
    "same, tree": {"model": "demo-drafter", "tree": "dynamic", "num_tokens": 3},
}
TEXT = "def read(self, path):\n    return self.pa"
PATHS = ["th", "th + oth", "\n\n    def höh", "th)\nclass Re"]


def drafter_of(options: dict[str, Any]) -> ModelDrafter:
    given = {"block_size": 4, "num_blocks": 128, "prefill_chunk": 32, **options}
    model = given.pop("model", "demo-drafter-other-vocab")
    return load_model_drafter(
        model, options=ModelOptions(device="cpu", **given), target=read_model_info("demo")
    )


def ask(drafter: ModelDrafter, length: int, path: list[int] | None = None) -> Proposal:
    [proposal] = drafter.propose([Query("r", length, 9, None if path is None else tuple(path))])
    proposal.check(4096)
    return proposal


def same(one: Proposal, other: Proposal) -> bool:
    return (
        one.tokens.tolist() == other.tokens.tolist()
        and one.parents.tolist() == other.parents.tolist()
        and np.allclose(one.log_probs, other.log_probs, atol=1e-4)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_behind_a_path_it_drafts_as_behind_text(kind: str) -> None:
    encode = load_tokenizer(read_model_info("demo").path).encode
    text = encode(TEXT, add_special_tokens=False)
    paths = [encode(written, add_special_tokens=False) for written in PATHS]
    drafter, other = drafter_of(KINDS[kind]), drafter_of(KINDS[kind])
    for temperature in (0.0, 0.8):
        opening = DraftRequest("r", np.array(text, dtype=np.int32), len(text), temperature, 9)
        drafter.open(opening)
        before = ask(drafter, len(text))
        num_said = 0
        for path in paths:
            other.open(opening)
            other.observe([Commit("r", len(text), np.array(path, dtype=np.int32))])
            expected = ask(other, len(text) + len(path))
            assert same(ask(drafter, len(text), path), expected)
            # Part of it first, and then all of it again.
            ask(drafter, len(text), path[:1])
            assert same(ask(drafter, len(text), path), expected)
            assert same(ask(drafter, len(text)), before)
            num_said += len(expected.tokens)
        assert num_said >= len(paths)
        # What it cannot read, or has no room for.
        for path in ([4096], [-1], [5] * 5 * KINDS[kind].get("num_blocks", 128)):
            assert ask(drafter, len(text), path).is_empty
        assert same(ask(drafter, len(text)), before)
        # A path writes over the cache of the text's last tokens: of those that others share, never.
        ask(drafter, len(text), paths[0])
        drafter.open(replace(opening, request_id="s"))
        [shared] = drafter.propose([Query("s", len(text), 9)])
        assert same(shared, before)
        drafter.observe([Commit("r", len(text), np.array(paths[-1], dtype=np.int32))])
        assert same(ask(drafter, len(text) + len(paths[-1])), expected)
        drafter._cache.check()
        drafter.close("s")
    assert drafter.prefix_counts.hits > 0
