"""Stages by CPU kernels: against torch's, and in any batch."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.kernels.cpu import build as cpu_build
from draftline.models.layers.fast_modules import FastLinear
from draftline.models.load.checkpoint import read_config
from draftline.models.load.partition import LayerSpan
from draftline.models.stage import cpu_path
from draftline.models.stage.cpu_path import CpuPath, load_kernels_for, load_part_kernels
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from draftline.models.stage.plain_path import PlainPath
from draftline.models.stage.stage import Stage
from support.inputs.steps import BLOCK_SIZE, PagedRequest, Rows, make_step
from support.tools.cpu_kernels import FOLDER, load_cpu_kernels
from support.tools.tiny_models import KINDS, VOCAB_SIZE, save_tiny_model

pytestmark = pytest.mark.compiler

TOKENS = np.random.default_rng(5).integers(2, VOCAB_SIZE, 60).tolist()
NODES, PARENTS = [5, 6, 7, 8, 9, 10, 11], [-1, 0, 0, 1, -1, 4, 3]
NUM_BLOCKS = 60
TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    load_cpu_kernels()


def stage_of(folder: Path, kind: str, compile_: str = "auto", **options: str) -> Stage:
    layers = KINDS[kind].config().num_hidden_layers
    return load_stage(
        folder, LayerSpan(0, layers, layers), NUM_BLOCKS, BLOCK_SIZE,
        options=StageOptions(compile=compile_, compile_cache=str(FOLDER), **options),
    )  # fmt: skip


def logits(stage: Stage, requests: Sequence[Rows]) -> torch.Tensor:
    step = make_step(requests)
    return stage.logits(step, None, np.arange(len(step.token_ids), dtype=np.int32))


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_logits_equal_those_of_torchs_operators(kind: str, tmp_path: Path) -> None:
    save_tiny_model(kind, tmp_path)
    own, theirs = stage_of(tmp_path, kind), stage_of(tmp_path, kind, "off")
    assert isinstance(own.path, CpuPath)
    assert not isinstance(theirs.path, CpuPath)
    scattered, straight, late = (
        PagedRequest(blocks)
        for blocks in ([9, 3, 8, 2, 30, 1, 29, 28], range(10, 18), range(40, 50))
    )
    for requests in (
        [scattered.chunk(TOKENS[:18], 0)],
        [straight.chunk(TOKENS[:1], 0)],
        [scattered.tree(NODES, PARENTS, 18), straight.chunk(TOKENS[1:12], 1)],
        [scattered.chunk(TOKENS[18:19], 18)],
        [
            straight.tree(NODES[:2], PARENTS[:2], 12),
            late.chunk(TOKENS[:3], 0),
            scattered.chunk(TOKENS[19:21], 19),
        ],
    ):
        torch.testing.assert_close(
            logits(own, requests), logits(theirs, requests), rtol=0, atol=1e-4
        )
        torch.testing.assert_close(own.kv.data, theirs.kv.data, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_rows_do_not_depend_on_their_company(kind: str, tmp_path: Path) -> None:
    """Bit by bit: token by token, in a prompt, on a path between siblings, beside a stranger."""
    save_tiny_model(kind, tmp_path)
    stage = stage_of(tmp_path, kind)
    request, stranger = PagedRequest(range(1, 16)), PagedRequest(range(20, 40))
    alone = torch.cat([logits(stage, [request.chunk(TOKENS[i : i + 1], i)]) for i in range(40)])
    assert torch.equal(logits(stage, [request.chunk(TOKENS[:40], 0)]), alone)
    tokens = [TOKENS[30], 9, TOKENS[31], 8, TOKENS[32], 7, TOKENS[33], 6, TOKENS[34]]
    tree = request.tree(tokens, [-1, -1, 0, 1, 2, 3, 4, 4, 6], 30)
    both = logits(stage, [tree, stranger.chunk(TOKENS[:33], 0)])
    assert torch.equal(both[[0, 2, 4, 6, 8]], alone[30:35])
    assert torch.equal(both[9:], alone[:33])


def test_weights_are_not_kept_twice(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    stage = stage_of(tmp_path, "llama")
    linears = [
        linear
        for layer in stage.path.part.layers
        for module in (layer.self_attn, layer.mlp)
        for linear in vars(module).values()
        if isinstance(linear, FastLinear)
    ]
    assert isinstance(stage.path.part.head, FastLinear)
    assert len(linears) == 5 * 4
    assert sum(linear.weight.numel() for linear in [*linears, stage.path.part.head]) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"dtype": "bfloat16"}, "float32, not in bfloat16"), ({"attention": "sdpa"}, "is sdpa")],
)
def test_what_they_do_not_know_stays_with_torch_and_invariance_is_refused(
    arguments: dict[str, str], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_tiny_model("llama", tmp_path)
    dtype = arguments.pop("dtype", "float32")

    def load(**options: str) -> Stage:
        return load_stage(
            tmp_path, LayerSpan(0, 4, 4), 10, BLOCK_SIZE, dtype,
            options=StageOptions(
                compile="auto", compile_cache=str(FOLDER), **{**arguments, **options}
            ),
        )  # fmt: skip

    with caplog.at_level(logging.INFO):
        assert not isinstance(load().path, CpuPath)
    assert reason in caplog.text
    with pytest.raises(ConfigError, match=f"batch_invariant: on needs .*{reason}"):
        load(batch_invariant="on")


def test_they_are_of_cpus(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    config, device = read_config(tmp_path), torch.device("cuda")
    for batch_invariant in ("auto", "on"):
        options = StageOptions(compile="auto", batch_invariant=batch_invariant)
        assert not load_kernels_for(config, "float32", device, options)


def test_layers_that_keep_states_take_them_where_they_can_be_built(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, built = torch.device("cpu"), StageOptions(compile="auto", compile_cache=str(FOLDER))
    assert load_part_kernels(cpu, built)
    assert not load_part_kernels(torch.device("cuda"), built)
    assert not load_part_kernels(cpu, StageOptions(compile="off"))
    monkeypatch.setattr("draftline.models.stage.cpu_path.are_loaded", lambda: False)
    monkeypatch.setattr("draftline.kernels.cpu.build.are_loaded", lambda: False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not load_part_kernels(cpu, StageOptions(compile="auto", compile_cache=str(tmp_path)))
    assert "no no-such-compiler" in caplog.text


def test_without_a_compiler_and_a_build_one_warning_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model("llama", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    for module in (cpu_build, cpu_path):
        monkeypatch.setattr(module, "are_loaded", lambda: False)
    with caplog.at_level(logging.WARNING):
        stage = load_stage(
            tmp_path, LayerSpan(0, 4, 4), 10, BLOCK_SIZE,
            options=StageOptions(compile="auto", compile_cache=str(tmp_path / "none")),
        )  # fmt: skip
    assert not isinstance(stage.path, CpuPath)
    [record] = caplog.records
    assert "no-such-compiler" in record.getMessage()


@pytest.mark.parametrize("is_required", [False, True])
def test_a_build_that_fails_is_one_warning_or_refuses_invariance(
    is_required: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    save_tiny_model("llama", tmp_path)
    compiler = tmp_path / "fails"
    compiler.write_text("#!/bin/sh\necho 'error: no such flag' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    for module in (cpu_build, cpu_path):
        monkeypatch.setattr(module, "are_loaded", lambda: False)

    def load() -> Stage:
        options = StageOptions(
            compile="auto", compile_cache=str(tmp_path / "none"),
            batch_invariant="on" if is_required else "auto",
        )  # fmt: skip
        return load_stage(tmp_path, LayerSpan(0, 4, 4), 10, BLOCK_SIZE, options=options)

    if is_required:
        with pytest.raises(ConfigError, match=r"batch_invariant: on needs .*no such flag"):
            load()
        return
    with caplog.at_level(logging.WARNING):
        stage = load()
    [record] = caplog.records
    assert "no such flag" in record.getMessage()
    assert isinstance(stage.path, PlainPath)
    assert logits(stage, [PagedRequest([1]).chunk(TOKENS[:3], 0)]).shape == (3, VOCAB_SIZE)


@pytest.mark.full
@pytest.mark.parametrize("capability", ["avx2", "default"])
def test_narrower_vectors_pass_the_same_tests(capability: str) -> None:
    paths = [TESTS / "kernels/cpu", TESTS / "models/stage/test_cpu_path.py"]
    result = subprocess.run(
        [Path(sys.executable).with_name("pytest"), "-q", "-n", "1", *paths, "-m", "not full"],
        env=os.environ | {"ATEN_CPU_CAPABILITY": capability},
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS.parent,
    )
    assert result.returncode == 0, result.stdout[-3000:]
