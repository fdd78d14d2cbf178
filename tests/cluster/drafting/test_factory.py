from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.drafting.factory import KINDS, build_drafter
from draftline.cluster.drafting.options import features_of_target, last_stage_heads
from draftline.core.errors import ConfigError, StoreError
from draftline.core.interfaces import FeatureDrafter
from draftline.core.proposals import DraftRequest, Query
from draftline.drafters.ngram.anpd import AnpdDrafter
from draftline.drafters.ngram.lookahead import LookaheadDrafter
from draftline.drafters.ngram.prompt_lookup import PromptLookupDrafter
from draftline.drafters.ngram.token_recycling import TokenRecyclingDrafter
from draftline.drafters.spectra.drafter import SpectraDrafter
from draftline.drafters.suffix.drafter import SuffixDrafter
from draftline.models.load.checkpoint import resolve_model_path
from draftline.models.load.model_info import read_model_info
from draftline.retrieval_store.search.lookup import REST_RULE
from draftline.training.tokenizers import train_tokenizer
from support.tools.tiny_models import save_tiny_model


@pytest.mark.parametrize(
    ("kind", "drafter_class"),
    [
        ("prompt_lookup", PromptLookupDrafter),
        ("spectra", SpectraDrafter),
        ("anpd", AnpdDrafter),
        ("suffix", SuffixDrafter),
        ("lookahead", LookaheadDrafter),
        ("token_recycling", TokenRecyclingDrafter),
    ],
)
def test_a_kind_becomes_its_drafter_with_the_configured_name(kind, drafter_class):
    assert isinstance(build_drafter(DrafterConfig(kind=kind)), drafter_class)
    assert build_drafter(DrafterConfig(kind=kind)).name == kind
    assert build_drafter(DrafterConfig(kind=kind, name="mine")).name == "mine"


def test_options_reach_the_drafter():
    text = np.array([1, 2, 3, 4, 5, 6, 7, 1, 2], dtype=np.int32)
    for num_tokens in (2, 5):
        drafter = build_drafter(DrafterConfig(kind="prompt_lookup", num_tokens=num_tokens))
        drafter.open(DraftRequest("r", text, len(text), 0.0, 1))
        (proposal,) = drafter.propose([Query("r", len(text), 16)])
        assert proposal.tokens.tolist() == [3, 4, 5, 6, 7][:num_tokens]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"kind": "oracle"}, "kind: unknown drafter 'oracle'; known: prompt_lookup"),
        ({"kind": "prompt_lookup", "max_ngrm": 3}, "max_ngrm.*did you mean 'max_ngram'"),
        ({"kind": "prompt_lookup", "transprt": "grpc"}, "transprt.*did you mean 'transport'"),
        ({"kind": "spectra", "model": "demo"}, "model: unknown key 'model'"),
        ({"kind": "prompt_lookup", "max_ngram": "three"}, "max_ngram"),
        ({"kind": "spectra", "window": -1}, "window"),
        ({"kind": "anpd", "ngram": 1}, "ngram: must be a whole number from 2 to 64"),
        ({"kind": "suffix", "max_spec_factor": "x"}, "max_spec_factor: must be a finite number"),
        ({"kind": "spectra", "window": 20}, "window: probes with up to 79 rows"),
        ({"kind": "lookahead", "window": 60, "ngram": 8}, "window: probes with up to 419 rows"),
        (
            {"kind": "token_recycling", "num_top_next_token": 8},
            "did you mean 'num_top_next_tokens'",
        ),
        ({"kind": "model"}, "model: must be given"),
        ({"kind": "retrieval"}, "store: must be given"),
        ({"kind": "retrieval", "store": "ftp://here"}, "store: 'ftp://here' is neither"),
    ],
)
def test_wrong_settings_name_the_key(config, message):
    with pytest.raises(ConfigError, match=message):
        build_drafter(DrafterConfig(**config))


def test_every_kind_refuses_an_unknown_key():
    for kind in KINDS:
        with pytest.raises(ConfigError, match="unknown key 'no_such_key'"):
            build_drafter(DrafterConfig(kind=kind, no_such_key=1))


@pytest.mark.parametrize(
    ("kind", "key", "default", "paper"),
    [("spectra", "window", 3, 15), ("lookahead", "window", 7, 15), ("anpd", "num_tokens", 7, 7)],
)
def test_a_profile_has_other_defaults(kind: str, key: str, default: int, paper: int) -> None:
    def value(**options: object) -> int:
        drafter = build_drafter(DrafterConfig(kind=kind, **options))
        return getattr(drafter._options, key)

    assert value() == value(profile="draftline") == default
    assert value(profile="paper") == paper
    assert value(**{"profile": "paper", key: 5}) == 5


def test_drafters_of_papers_have_their_trees() -> None:
    paper = {"kind": "spectra", "profile": "paper"}
    config = EngineConfig(model="demo", drafters=[DrafterConfig.model_validate(paper)])
    assert config.drafters[0].max_nodes == 60
    assert (config.tree_nodes, config.node_budget) == (60, "ordered")
    both = [paper, {"kind": "retrieval", "profile": "paper", "store": "demo"}]
    config = EngineConfig.model_validate({"model": "demo", "drafters": both})
    assert [drafter.max_nodes for drafter in config.drafters] == [60, 64]
    assert config.tree_nodes == 64
    [chain] = EngineConfig.model_validate(
        {"model": "demo", "drafters": [{"kind": "anpd", "profile": "paper"}]}
    ).drafters
    assert chain.max_nodes == 16, "longer than its chains"
    # What is given is followed, and ours beside it keep our tree.
    given = {"drafters": [paper | {"max_nodes": 8}], "tree_nodes": 12, "node_budget": "full"}
    config = EngineConfig.model_validate({"model": "demo"} | given)
    assert (config.drafters[0].max_nodes, config.tree_nodes, config.node_budget) == (8, 12, "full")
    mixed = EngineConfig.model_validate({"model": "demo", "drafters": [paper, {"kind": "suffix"}]})
    assert [drafter.max_nodes for drafter in mixed.drafters] == [60, 16]
    assert (mixed.tree_nodes, mixed.node_budget) == (16, "adaptive")


@pytest.mark.parametrize("kind", ["head", "mtp"])
def test_heads_of_papers_have_eagle_2s_tree(kind: str) -> None:
    given = {"kind": kind, "profile": "paper"} | (
        {"model": "demo-griffin"} if kind == "head" else {}
    )
    config = EngineConfig.model_validate({"model": "demo", "drafters": [given]})
    assert config.drafters[0].max_nodes == config.tree_nodes == 60
    assert config.node_budget == "ordered"
    if kind == "mtp":
        return
    target = read_model_info(resolve_model_path("demo"))
    [head] = last_stage_heads(config, target, range(target.num_layers))
    assert (head.max_nodes, head.options.num_tokens, head.options.top_k) == (60, 6, 10)


def test_the_papers_retrieval_counts_as_rest_does(tmp_path: Path) -> None:
    paper = {"kind": "retrieval", "profile": "paper"}
    drafter = build_drafter(DrafterConfig(**paper, store=str(tmp_path)))
    assert drafter._lookup._rule == REST_RULE


@pytest.mark.parametrize(
    ("kind", "profile", "message"),
    [
        ("suffix", "paper", "profile: of suffix must be draftline, not 'paper'"),
        ("spectra", "other", "profile: of spectra must be draftline or paper, not 'other'"),
    ],
)
def test_an_unknown_profile_is_refused(kind: str, profile: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_drafter(DrafterConfig(kind=kind, profile=profile))


def test_retrieval_over_a_folder(tmp_path: Path):
    drafter = build_drafter(DrafterConfig(kind="retrieval", name="stored", store=str(tmp_path)))
    assert drafter.name == "stored"


def test_a_folder_that_is_not_there_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="store: no folder"):
        build_drafter(DrafterConfig(kind="retrieval", store=str(tmp_path / "store")))


def test_a_store_out_of_reach_is_a_store_error_at_the_start():
    with pytest.raises(StoreError):
        build_drafter(DrafterConfig(kind="retrieval", store="redis://127.0.0.1:1/0"))


def test_a_server_loads_a_head_for_the_model_that_it_is_told_of():
    config = DrafterConfig(kind="head", model="demo-griffin")
    drafter = build_drafter(config, EngineConfig(model="demo"))
    served = EngineConfig(model="demo", drafters=(config,))
    assert isinstance(drafter, FeatureDrafter)
    assert drafter.feature_layers == features_of_target(served)
    with pytest.raises(ConfigError, match=r"kind: .*start the server with --target MODEL"):
        build_drafter(config)
    with pytest.raises(ConfigError, match=r"model: .*does not fit the served model"):
        build_drafter(config, EngineConfig(model="demo-drafter"))


def test_nothing_is_handed_out_where_there_is_no_head():
    assert features_of_target(EngineConfig(model="demo")) is None


def test_a_model_of_another_tokenizer_loads_unless_it_shall_be_the_same(tmp_path: Path):
    same, other = (save_tiny_model("llama", tmp_path / name) for name in ("same", "other"))
    for folder in (same, other):
        train_tokenizer([f"def {folder.name}(): pass"], 270, 256).save_pretrained(folder)
    engine = EngineConfig(model=str(same))
    drafter = build_drafter(DrafterConfig(kind="model", model=str(same), num_blocks=8), engine)
    assert drafter.name == "model"
    config = DrafterConfig(kind="model", model=str(other), num_blocks=8)
    assert build_drafter(config, engine).name == "model"
    with pytest.raises(ConfigError, match=r"vocabulary: .*has another tokenizer"):
        build_drafter(config.model_copy(update={"vocabulary": "same"}), engine)
