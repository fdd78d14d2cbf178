"""Heads that are trained over stages of a target are those that are trained on the whole target."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftline.core.errors import ConfigError, StageLost
from draftline.deploy.cli.main import app
from draftline.deploy.cli.train import fit
from draftline.deploy.cli.train.job import HeadJob
from draftline.deploy.cli.train.stages import target_stages, with_stages
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.load_head import HeadConfig, load_head
from draftline.training.heads.distilled_texts import DistilledText, TextFolder
from draftline.training.heads.feature_passes import (
    best_tokens,
    draft_logits,
    drafting_passes,
    text_rows,
)
from draftline.training.heads.objectives import Network, NetworkConfig
from draftline.training.heads.target import Target
from draftline.training.heads.trainer import HELD_OUT_TEXTS, read_log, read_losses, train_head
from support.fakes.recorded_progress import RecordedProgress, RecordedWork
from support.inputs.tiny_heads import EVERY_NETWORK, PLAN, eagle3, uneven_texts
from support.servers.processes import stage_pids
from support.servers.ray_cluster import no_actors_left, ray_cluster
from support.tools.tiny_models import VOCAB_SIZE, save_tiny_model
from typer.testing import CliRunner

runner = CliRunner()
TEXTS = uneven_texts(VOCAB_SIZE)
# A step holds less than the texts of a training step.
STAGES = {"pipeline_parallel_size": 3, "max_num_batched_tokens": 16}
RAY = {**STAGES, "backend": "ray", "cpus_per_stage": 0.5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of eight layers."""
    return save_tiny_model("llama_deep", tmp_path_factory.mktemp("deep"))


def add_texts(path: Path, texts: Sequence[DistilledText]) -> None:
    folder = TextFolder(path, {})
    for index, text in enumerate(texts):
        folder.add(index, [text])


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts")
    add_texts(path, TEXTS)
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with ray_cluster():
        yield


def job(folder: Path, stages: dict[str, Any]) -> HeadJob:
    own = HeadJob(texts=Path(), output=Path(), model=str(folder), window=PLAN.window)
    return with_stages(own, stages)


def trained_over(
    stages: dict[str, Any], config: NetworkConfig, folder: Path, run_dir: Path
) -> Network:
    used = job(folder, stages).stages
    assert used is not None
    with target_stages(used, config) as states:
        return train_head(config, folder, TEXTS, PLAN, run_dir, states=states)


def of_several_layers(folder: Path) -> HeadConfig:
    """An EAGLE-3 head that reads a layer of each stage."""
    return replace(eagle3(folder), feature_layers=(1, 4, 7))


def assert_same(found: tuple[Network, Path], expected: tuple[Network, Path]) -> None:
    """Networks and the folders of their runs."""
    assert read_losses(found[1]) == pytest.approx(read_losses(expected[1]), rel=1e-4)
    assert [row[2:] for row in read_log(found[1])] == [row[2:] for row in read_log(expected[1])]
    for name, tensor in expected[0].state_dict().items():
        torch.testing.assert_close(found[0].state_dict()[name], tensor, atol=1e-4, rtol=1e-3)


def drafts(head: Network, folder: Path) -> list[list[int]]:
    """Greedy chains of four tokens after every token of the texts."""
    assert isinstance(head, FeatureHead)
    target = Target(folder, torch.device("cpu"), head.config.layers_of(8))
    rows = text_rows(target.embed, target.batch(TEXTS, PLAN.window))
    with torch.no_grad():
        return [
            best_tokens(head, draft_logits(head, target.lm_head, drafted.predict)).tolist()
            for drafted in drafting_passes(head, rows, 4)
        ]


@pytest.mark.cluster
@pytest.mark.usefixtures("cluster")
def test_a_head_over_three_processes_drafts_as_one_of_the_whole_target(
    folder: Path, tmp_path: Path
) -> None:
    config = of_several_layers(folder)
    whole = train_head(config, folder, TEXTS, PLAN, tmp_path / "whole")
    head = trained_over(RAY, config, folder, tmp_path / "stages")
    assert asyncio.run(no_actors_left())
    assert_same((head, tmp_path / "stages"), (whole, tmp_path / "whole"))
    assert drafts(head, folder) == drafts(whole, folder)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[] if kind in {"griffin", "dspark"} else pytest.mark.full)
        for kind in EVERY_NETWORK
    ],
)
def test_networks_of_every_kind_are_the_same(folder: Path, tmp_path: Path, kind: str) -> None:
    config = EVERY_NETWORK[kind](folder)
    whole = train_head(config, folder, TEXTS, PLAN, tmp_path / "whole")
    head = trained_over(STAGES, config, folder, tmp_path / "stages")
    assert_same((head, tmp_path / "stages"), (whole, tmp_path / "whole"))


@pytest.mark.parametrize(
    "kind",
    ["qwen3_5_text", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("lfm2", "gpt2"))],
)
def test_any_decoder_teaches_heads_whole_and_over_stages(kind: str, tmp_path: Path) -> None:
    """Its layers may keep states, and its last norm may have any name."""
    folder = save_tiny_model(kind, tmp_path / "target")
    config = eagle3(folder)
    whole = train_head(config, folder, TEXTS, PLAN, tmp_path / "whole")
    head = trained_over(STAGES | {"max_num_seqs": 2}, config, folder, tmp_path / "stages")
    assert_same((head, tmp_path / "stages"), (whole, tmp_path / "whole"))


class KillingWork(RecordedWork):
    """Kills the second stage after the fifth step."""

    def advance(self, count: float = 1, note: str | None = None) -> None:
        super().advance(count, note)
        if self.done == 5:
            os.kill(stage_pids()[1], signal.SIGKILL)


@contextmanager
def killing(
    label: str, *, total: float | None, unit: str, done: float = 0
) -> Iterator[RecordedWork]:
    yield KillingWork(label, total, done)


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.usefixtures("cluster")
def test_a_run_that_lost_a_stage_goes_on(
    folder: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "train", "griffin", "--texts", str(texts), "--output", str(tmp_path / "head"),
        "--model", str(folder), "--num-steps", "9", "--texts-per-step", "2", "--window", "12",
        "--backend", "ray", "--pipeline-parallel-size", "3", "--cpus-per-stage", "0.5",
    ]  # fmt: skip
    plan_of = fit.head_plan
    monkeypatch.setattr(fit, "head_plan", lambda *args: replace(plan_of(*args), checkpoint_every=3))
    with monkeypatch.context() as patched:
        patched.setattr(fit, "progress", killing)
        result = runner.invoke(app, command)
    assert isinstance(result.exception, StageLost), result.output
    message = str(result.exception)
    assert re.search(r"stage \d closed its connection|is dead", message), message
    assert f"{tmp_path / 'head.run'} has the last checkpoint" in message
    assert [row[0] for row in read_log(tmp_path / "head.run")] == [3]
    progress = RecordedProgress()
    with monkeypatch.context() as patched:
        patched.setattr(fit, "progress", progress)
        result = runner.invoke(app, command)
    assert result.exit_code == 0, (result.output, result.exception)
    assert len(progress.works[-1].notes) == 6
    assert isinstance(load_head(tmp_path / "head"), FeatureHead)


def test_rounded_stages_and_short_steps(folder: Path, texts: Path, tmp_path: Path) -> None:
    command = [
        "train", "medusa", "--texts", str(texts), "--output", str(tmp_path / "head"),
        "--model", str(folder), "--num-steps", "2", "--texts-per-step", "2", "-pp", "2",
        "--dtype", "bfloat16", "--quantization", "int8", "--max-num-batched-tokens", "16",
    ]  # fmt: skip
    result = runner.invoke(app, command)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "accepted at each depth" in result.output


@pytest.mark.parametrize("flags", [[], ["--pipeline-parallel-size", "2"]])
def test_a_dry_run_trains_nothing(
    folder: Path, texts: Path, tmp_path: Path, flags: list[str]
) -> None:
    command = [
        "train", "eagle3", "--texts", str(texts), "--output", str(tmp_path / "head"), "--model",
        str(folder), "--feature-layers", "1,4", "--texts-per-step", "3", "--num-steps", "7",
        "--dry-run", *flags,
    ]  # fmt: skip
    result = runner.invoke(app, command)
    assert result.exit_code == 0, (result.output, result.exception)
    assert not list(tmp_path.iterdir())
    place = "2 stages (local)" if flags else "whole in this process"
    num_tokens = sum(len(text.tokens) for text in TEXTS[:-HELD_OUT_TEXTS])
    assert f", {place}, " in result.output
    assert f"texts: 8 with {num_tokens} tokens; 32 more are held out" in result.output
    # Two layers and the last one, of 32 numbers each.
    assert "states: 384 bytes a token in float32, 192 in 16 bits" in result.output
    assert "step: 3 texts, " in result.output
    [seconds, states_s, tokens_s, mb_s] = numbers(
        r"time: ([\d.]+) s a step, ([\d.]+) s of it for the states "
        r"\(([\d,]+) tokens or ([\d.]+) MB a second\); 7 steps in ",
        result.output,
    )
    assert 0 <= states_s <= seconds
    assert mb_s == pytest.approx(tokens_s * 384 / 1e6, abs=0.06)
    [peak_gb] = numbers(r"memory: ([\d.]+) GB at most", result.output)
    assert peak_gb <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9 + 0.05
    assert peak_gb > 0.1 or torch.cuda.is_available()


def numbers(pattern: str, text: str) -> list[float]:
    """What the groups of a pattern match, across broken lines."""
    found = re.search(pattern, " ".join(text.split()))
    assert found, text
    return [float(group.replace(",", "")) for group in found.groups()]


def test_flags_of_stages_are_checked(folder: Path, texts: Path, tmp_path: Path) -> None:
    command = [
        "train", "medusa", "--texts", str(texts), "--output", str(tmp_path / "head"), "--model",
        str(folder), "--pipeline-parallel-size", "8", "--kv-cache-tokens", "64", "--window", "300",
    ]  # fmt: skip
    add_texts(tmp_path / "long", [DistilledText((3,) * 100, ((2, 100),))] * 40)
    result = runner.invoke(app, [*command, "--texts", str(tmp_path / "long")])
    assert isinstance(result.exception, ConfigError)
    assert "kv_cache_tokens: is 64, less than a text of 100 tokens" in str(result.exception)
    refused = runner.invoke(app, [*command, "--no-enforce-eager"])
    assert refused.exit_code == 2
    assert "--no-enforce-eager" in refused.output
