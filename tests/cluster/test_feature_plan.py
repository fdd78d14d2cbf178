"""Running sums in place of states: who gets them, and that heads draft the same by them."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from draftline import DrafterConfig, EngineConfig
from draftline.cluster.engine.assembly import ModelPlan, plan_model
from draftline.cluster.transport.stage_spec import StageSpec
from draftline.core.reach import EVERY_REACH
from draftline.core.steps import HeadDrafts, HeadTask, StepOutput, prompt_step
from draftline.models.heads.load_head import build_head
from draftline.training.heads.export import export_head
from support.inputs import tiny_heads
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from torch import Tensor

BLOCK_SIZE = 16
NUM_ROWS, NUM_NODES = 21, 10
# With states of the first stages of three, and of the last.
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3.1": {"norm_features": "each"},
    "p_eagle": {},
    "dflash": {"num_features": 3, "feature_layers": (0, 1, 3)},
    "dspark": {"num_features": 3, "feature_layers": (2, -1, 0)},
    "spec_former": {"feature_layers": (-1, 0, 1, 3)},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("heads")
    for kind, own in {**KINDS, "griffin": {}, "medusa": {}}.items():
        config = replace(tiny_heads.EVERY_CONFIG[kind.removesuffix(".1")](target), **own)
        export_head(build_head(config), folder / kind, {}, {})
    return {kind: folder / kind for kind in (*KINDS, "griffin", "medusa")}


def planned(target: Path, *drafters: DrafterConfig, stages: int = 3, **settings: Any) -> ModelPlan:
    config = EngineConfig(
        model=str(target), drafters=drafters, pipeline_parallel_size=stages, compile="off",
        block_size=BLOCK_SIZE, kv_cache_tokens=64, **settings,
    )  # fmt: skip
    return plan_model(config, has_gpu=settings.get("device") == "cuda")


def head_of(folder: Path, **options: Any) -> DrafterConfig:
    return DrafterConfig(kind="head", **{"name": folder.name, "model": str(folder), **options})


def has_sums(plan: ModelPlan) -> bool:
    found = {spec.options is not None and bool(spec.options.feature_sums) for spec in plan.specs}
    [has] = found
    return has


def drafted(specs: tuple[StageSpec, ...]) -> list[HeadDrafts]:
    """What heads draft behind a prompt, of stages that are built as workers build them."""
    stages, found = [pickle.loads(pickle.dumps(spec)).build() for spec in specs], []
    names = [spec.name for spec in specs[-1].heads]
    tokens = np.array([(7 * row) % VOCAB_SIZE for row in range(NUM_ROWS)], dtype=np.int32)
    tasks = tuple(HeadTask(name, (0,), (NUM_NODES,), (EVERY_REACH,)) for name in names)
    step = replace(
        prompt_step(NUM_ROWS, BLOCK_SIZE), token_ids=tokens, head_tasks=tasks,
        following_tokens=np.array([-1], dtype=np.int32), request_keys=(1,),
    )  # fmt: skip
    hidden: Tensor | None = None
    for stage, spec in zip(stages, specs, strict=True):
        result = stage.launch(step, hidden)
        if isinstance(result, Tensor):
            hidden = result
            assert hidden.shape == (NUM_ROWS, spec.output_size)
        else:
            output = result()
            assert isinstance(output, StepOutput)
            found += output.head_drafts
    return found


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_drafts_the_same_by_a_sum(
    kind: str, stages: int, target: Path, heads: dict[str, Path]
) -> None:
    plans = [
        planned(target, head_of(heads[kind]), stages=stages, head_features=features)
        for features in ("states", "sums")
    ]
    assert not has_sums(plans[0])
    widths = [sum(spec.output_size for spec in plan.specs[:-1]) for plan in plans]
    assert has_sums(plans[1]) == (widths[1] < widths[0]) == (stages > 1)
    [[by_states], [by_sums]] = [drafted(plan.specs) for plan in plans]
    [mine], [theirs] = by_sums.proposals, by_states.proposals
    assert len(mine.tokens) > 1
    np.testing.assert_array_equal(mine.tokens, theirs.tokens)
    np.testing.assert_array_equal(mine.parents, theirs.parents)
    np.testing.assert_allclose(mine.log_probs, theirs.log_probs, atol=1e-4)


def test_heads_with_sums_stand_beside_heads_with_states(
    target: Path, heads: dict[str, Path]
) -> None:
    """Two sums, and two heads that read the last layer alone."""
    names = ("eagle3", "griffin", "dspark", "medusa")
    drafters = [head_of(heads[name]) for name in names]
    plan = planned(target, *drafters, head_features="sums")
    assert has_sums(plan)
    together = drafted(plan.specs)
    assert [one.source for one in together] == list(names)
    for name, drafter, mine in zip(names, drafters, together, strict=True):
        [alone] = drafted(planned(target, drafter, head_features="states").specs)
        np.testing.assert_array_equal(
            mine.proposals[0].tokens, alone.proposals[0].tokens, err_msg=name
        )


def test_sums_are_taken_between_gpus_of_a_cluster_alone(
    target: Path, heads: dict[str, Path]
) -> None:
    head = head_of(heads["eagle3"])
    gpus = {"backend": "ray", "device": "cuda"}
    assert has_sums(planned(target, head, **gpus))
    assert not has_sums(planned(target, head, **gpus, head_features="states"))
    assert not has_sums(planned(target, head, device="cuda"))
    assert not has_sums(planned(target, head, backend="ray", device="cpu"))


def test_states_stay_where_sums_would_not_be_narrower(target: Path, heads: dict[str, Path]) -> None:
    # Two stages of two layers: one state of DFlash's stands before the border, and no state else.
    apart = export_of(target, heads["dflash"].with_name("apart"))
    assert not has_sums(planned(target, head_of(apart), stages=2, head_features="sums"))
    for kind in ("griffin", "medusa"):
        assert not has_sums(planned(target, head_of(heads[kind]), head_features="sums"))


def export_of(target: Path, folder: Path) -> Path:
    torch.manual_seed(3)
    config = replace(tiny_heads.dflash(target), feature_layers=(1, 2))
    export_head(build_head(config), folder, {}, {})
    return folder


def test_heads_that_states_are_sent_to_read_states(target: Path, heads: dict[str, Path]) -> None:
    near = head_of(heads["dflash"], placement="actor")
    plan = planned(target, head_of(heads["eagle3"]), near, head_features="sums")
    assert not has_sums(plan)
