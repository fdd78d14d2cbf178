"""Head drafters on random checkpoints, against the network over the whole text each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.drafting.local_drafter import LocalDrafter
from draftline.cluster.drafting.replies import DrafterLimits
from draftline.core.errors import ConfigError, DrafterError
from draftline.core.proposals import (
    Commit,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    Proposal,
    Query,
)
from draftline.drafters.heads.drafter import feature_layers, load_head_drafter
from draftline.drafters.heads.options import HeadOptions
from draftline.models.load.model_info import read_model_info
from support.inputs import head_checkpoints as published
from support.inputs.head_pairs import NUM_LAYERS, SEED, TEXT, Pair, chosen, opened, tell
from transformers import AutoModelForCausalLM, LlamaConfig


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_chain_is_what_the_whole_network_says(pair: Pair, temperature: float) -> None:
    drafter = opened(pair, TEXT, temperature, tree="chain", num_tokens=3)
    tokens = list(TEXT)
    for new in ([], [9], [4, 30, 2], [11]):
        if new:
            tokens = tell(drafter, pair, tokens, new)
        [proposal] = drafter.propose([Query("r", len(tokens), 8)])
        proposal.check(published.VOCAB)
        drafted: list[int] = []
        for token in proposal.tokens.tolist():
            assert token == chosen(pair, tokens, drafted, temperature)
            drafted.append(token)
        assert len(drafted) == 3
        # Nothing changes by asking again.
        [again] = drafter.propose([Query("r", len(tokens), 8)])
        assert again.tokens.tolist() == drafted


def test_every_path_of_a_tree_is_what_the_whole_network_says(pair: Pair) -> None:
    drafter = opened(pair, TEXT, tree="dynamic", top_k=3, num_tokens=3)
    [proposal] = drafter.propose([Query("r", len(TEXT), 30)])
    paths = paths_of(proposal)
    assert max(map(len, paths)) == 3
    for path, log_prob in zip(paths, proposal.log_probs.tolist(), strict=True):
        with torch.inference_mode():
            log_probs = pair.logits(TEXT, path[:-1]).log_softmax(-1)
        assert log_prob == pytest.approx(float(log_probs[path[-1]]), abs=2e-4)


ALL_AT_ONCE = {
    "p_eagle", "own_p_eagle", "specformer", "medusa", "dflash", "mixed_dflash",
    "own_dflash",
}  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_tree_of_the_best_nodes(pair: Pair, temperature: float) -> None:
    if pair.name not in ALL_AT_ONCE:
        with pytest.raises(ConfigError, match="all levels at once"):
            pair.drafter(tree="best_first")
        return
    drafter = opened(pair, TEXT, temperature, tree="best_first", num_tokens=3)
    [proposal] = drafter.propose([Query("r", len(TEXT), 9)])
    proposal.check(published.VOCAB)
    paths = paths_of(proposal)
    assert len(paths) == 9
    levels = [dict[int, float]() for _ in range(3)]
    for path, log_prob in zip(paths, proposal.log_probs.tolist(), strict=True):
        # A token's probability is the same behind all nodes of a level.
        known = levels[len(path) - 1].setdefault(path[-1], log_prob)
        assert known == log_prob
        if not temperature:
            with torch.inference_mode():
                log_probs = pair.logits(TEXT, path[:-1]).log_softmax(-1)
            assert log_prob == pytest.approx(float(log_probs[path[-1]]), abs=2e-4)
    for depth in range(max(map(len, paths))):
        best = max(levels[depth], key=levels[depth].__getitem__)
        assert best == chosen(pair, TEXT, [0] * depth, temperature)


def test_the_default_tree_is_the_one_that_suits_the_head(pair: Pair) -> None:
    tree = "best_first" if pair.name in ALL_AT_ONCE else "dynamic"
    query = Query("r", len(TEXT), 7)
    [mine] = opened(pair, TEXT).propose([query])
    [expected] = opened(pair, TEXT, tree=tree).propose([query])
    assert mine.tokens.tolist() == expected.tokens.tolist()
    assert mine.parents.tolist() == expected.parents.tolist()


def paths_of(proposal: Proposal) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(proposal.tokens.tolist(), proposal.parents.tolist(), strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def test_a_draft_ends_by_the_clock_where_levels_take_longer_than_they_save(pair: Pair) -> None:
    """A pass takes a second of a clock that counts them; heads that draft all levels in one pass
    have nothing to end."""
    drafter = opened(pair, TEXT, tree="chain", num_tokens=3)
    drafter.clock = lambda: float(drafter.num_passes)
    most, is_at_once = 3, pair.name in ALL_AT_ONCE

    def passes_and_depth(token_s: float) -> tuple[int, int]:
        before = drafter.num_passes
        [proposal] = drafter.propose([Query("r", len(TEXT), 8, token_s=token_s)])
        return drafter.num_passes - before, len(proposal.tokens)

    whole = (1 if is_at_once else most, most)
    for _ in range(20):
        assert passes_and_depth(0.0) == whole
    assert passes_and_depth(1e6) == whole
    assert passes_and_depth(1e-6) == (whole if is_at_once else (1, 1))


def test_requests_together_are_as_alone(pair: Pair) -> None:
    alone = {}
    together = pair.drafter(top_k=2, num_tokens=3)
    queries = []
    for index, name in enumerate("abc"):
        tokens = TEXT[: 6 + index]
        request = DraftRequest(name, np.array(tokens, dtype=np.int32), 3, 0.5 * index, SEED)
        rows = FeatureRows(name, 0, pair.features(tokens)[:-1])
        queries.append(Query(name, len(tokens), 12))
        for drafter in (single := pair.drafter(top_k=2, num_tokens=3), together):
            drafter.open(request)
            drafter.observe_features([rows])
        [alone[name]] = single.propose([queries[-1]])
    for proposal, name in zip(together.propose(queries), "abc", strict=True):
        assert proposal.tokens.tolist() == alone[name].tokens.tolist()
        assert proposal.parents.tolist() == alone[name].parents.tolist()
        np.testing.assert_allclose(proposal.log_probs, alone[name].log_probs, atol=1e-4)


def test_without_the_last_feature_there_is_no_draft(pair: Pair) -> None:
    drafter = opened(pair, TEXT)
    drafter.observe([Commit("r", len(TEXT), np.array([3, 4], dtype=np.int32))])
    [proposal] = drafter.propose([Query("r", len(TEXT) + 2, 8)])
    assert proposal.is_empty


def test_drafts_go_on_behind_a_hole(pair: Pair) -> None:
    """Features of two tokens never came: what is behind them sees nothing of these."""
    drafter = opened(pair, TEXT)
    drafter.observe([Commit("r", len(TEXT), np.array([3, 4], dtype=np.int32))])
    tokens = tell(drafter, pair, [*TEXT, 3, 4], [8, 1])
    [proposal] = drafter.propose([Query("r", len(tokens), 8)])
    assert not proposal.is_empty


def test_a_request_that_is_opened_in_its_middle_drafts_from_the_states_that_follow(
    pair: Pair,
) -> None:
    """As one whose server was started anew: of its text before there are no states."""
    drafter = pair.drafter()
    drafter.open(DraftRequest("r", np.array(TEXT, dtype=np.int32), 3, 0.0, SEED))
    [proposal] = drafter.propose([Query("r", len(TEXT), 8)])
    assert proposal.is_empty
    tokens = tell(drafter, pair, TEXT, [8, 1])
    [proposal] = drafter.propose([Query("r", len(tokens), 8)])
    assert not proposal.is_empty


def test_features_that_come_again_change_nothing(pair: Pair) -> None:
    drafter, other = opened(pair, TEXT), opened(pair, TEXT)
    [first] = drafter.propose([Query("r", len(TEXT), 8)])
    other.propose([Query("r", len(TEXT), 8)])
    other.observe_features([FeatureRows("r", 0, pair.features(TEXT)[:-1])])
    [again] = other.propose([Query("r", len(TEXT), 8)])
    assert again.tokens.tolist() == first.tokens.tolist()
    tokens = tell(drafter, pair, TEXT, [2, 2])
    assert tell(other, pair, TEXT, [2, 2]) == tokens
    [one], [two] = (d.propose([Query("r", len(tokens), 8)]) for d in (drafter, other))
    assert one.tokens.tolist() == two.tokens.tolist()


def test_the_oldest_rows_are_let_go(pair: Pair) -> None:
    drafter = opened(pair, TEXT * 7, max_tokens=64)
    drafter.propose([Query("r", 7 * len(TEXT), 8)])
    before = drafter.memory_bytes
    tokens = TEXT * 7
    for _ in range(3):
        tokens = tell(drafter, pair, tokens, TEXT)
        [proposal] = drafter.propose([Query("r", len(tokens), 8)])
        assert not proposal.is_empty
    assert drafter.memory_bytes < 2 * before


def test_unknown_requests(pair: Pair) -> None:
    drafter = opened(pair, TEXT)
    drafter.observe_features([FeatureRows("other", 0, pair.features(TEXT))])
    with pytest.raises(DrafterError, match="not open"):
        drafter.propose([Query("other", 3, 8)])
    drafter.close("r")
    drafter.close("r")
    assert not drafter.memory_bytes


async def test_its_link_cuts_its_own_layers_from_those_of_all_heads(pair: Pair) -> None:
    drafter = pair.drafter()
    read = drafter.feature_layers
    assert read == FeatureLayers(feature_layers(pair.folder, pair.target), published.HIDDEN)
    given = FeatureLayers(tuple(range(-1, NUM_LAYERS)), published.HIDDEN)
    rows = pair.features(TEXT)[:-1]
    wide = np.zeros((len(rows), len(given.layers), given.width), dtype=np.float32)
    places = [given.layers.index(layer) for layer in read.layers]
    wide[:, places] = rows.reshape(len(rows), len(read.layers), -1)
    limits = DrafterLimits(vocab_size=published.VOCAB)
    hub = DrafterHub([LocalDrafter(drafter, features=given)], limits)
    await hub.start()
    hub.open(DraftRequest("r", np.array(TEXT, dtype=np.int32), 3, 0.0, SEED))
    hub.note_features([FeatureRows("r", 0, wide.reshape(len(rows), -1))])
    [mine] = (await hub.exchange([], [Query("r", len(TEXT), 8)]))["r"]
    [expected] = opened(pair, TEXT).propose([Query("r", len(TEXT), 8)])
    assert mine.tokens.tolist() == expected.tokens.tolist()
    await hub.stop()


def test_a_head_of_another_model_is_refused(pair: Pair, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, intermediate_size=24,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="does not fit the served model"):
        load_head_drafter(pair.folder, read_model_info(tmp_path))


@pytest.mark.parametrize(
    ("options", "field"),
    [({"tree": "nowhere.json"}, "tree"),
     ({"top_k": 0}, "top_k"), ({"max_tokens": 3}, "max_tokens"),
     ({"dtype": "int4"}, "dtype")],
)  # fmt: skip
def test_options_are_checked(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HeadOptions(**options)
    assert caught.value.field == field
