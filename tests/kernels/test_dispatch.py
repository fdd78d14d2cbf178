from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.kernels import dispatch
from draftline.kernels.dispatch import Machine, choose_attention, flash_obstacle, runs_triton

CPU = Machine(None, has_triton=True, has_flash_attn=False)
GPU = Machine((9, 0), has_triton=True, has_flash_attn=False)
WITH_FLASH = Machine((9, 0), has_triton=True, has_flash_attn=True)


@pytest.mark.parametrize(
    ("machine", "dtype", "block_size", "name", "reason"),
    [
        (CPU, torch.float32, 16, "sdpa", "no GPU"),
        (GPU, torch.bfloat16, 16, "triton", "flash-attn is not installed"),
        (WITH_FLASH, torch.bfloat16, 256, "flash_attn", "installed"),
        (WITH_FLASH, torch.bfloat16, 16, "triton", "no multiple of 256"),
        (WITH_FLASH, torch.float32, 256, "triton", "float16 and bfloat16 only"),
        (Machine((9, 0), False, True), torch.bfloat16, 256, "sdpa", "pip install draftline[gpu]"),
        (Machine((7, 5), True, False), torch.float16, 16, "sdpa", "below 8.0"),
    ],
)
def test_auto(
    machine: Machine, dtype: torch.dtype, block_size: int, name: str, reason: str
) -> None:
    choice = choose_attention(machine, dtype, block_size)
    assert choice.name == name
    assert reason in choice.reason


def test_what_is_asked_for_is_taken() -> None:
    assert choose_attention(WITH_FLASH, torch.bfloat16, 256, "triton").name == "triton"
    assert choose_attention(GPU, torch.bfloat16, 16, "sdpa").name == "sdpa"
    interpreting = Machine(None, True, False, is_interpreting=True)
    assert choose_attention(interpreting, torch.float32, 16, "triton").name == "triton"
    assert choose_attention(interpreting, torch.float32, 16).name == "sdpa"


@pytest.mark.parametrize(
    ("machine", "wanted", "message"),
    [
        (CPU, "triton", "attention: cannot be triton: it needs a GPU"),
        (CPU, "flash_attn", "attention: cannot be flash_attn: it needs a GPU"),
        (GPU, "flash_attn", "attention: cannot be flash_attn: the package flash-attn"),
        (GPU, "eager", "attention: must be auto, sdpa, triton, flash_attn, not 'eager'"),
    ],
)
def test_what_cannot_run_is_refused(machine: Machine, wanted: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_attention(machine, torch.bfloat16, 256, wanted)


def test_latents_are_read_by_draftlines_kernels() -> None:
    facts = WITH_FLASH, torch.bfloat16, 256
    assert choose_attention(*facts, has_latents=True).name == "triton"
    assert choose_attention(CPU, torch.bfloat16, 256, has_latents=True).name == "sdpa"
    with pytest.raises(ConfigError, match="cannot be flash_attn: it reads no latents"):
        choose_attention(*facts, "flash_attn", has_latents=True)


def test_triton_is_not_imported_where_it_is_not_used() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import draftline.models.attention.backend, draftline.kernels.dispatch as d\n"
        "d.load_ops('reference')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=False, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("found", "is_taken"),
    [(None, False), ("2.5.9", False), ("2.6.3", True), ("2.8.1", True), ("3.0.0", False)],
)
def test_flash_attn_is_taken_in_the_versions_of_the_backend(
    found: str | None, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "flash_version", lambda: found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    machine = Machine.of("cuda")
    assert machine.has_flash_attn == is_taken
    against = flash_obstacle(replace(machine, has_triton=True), torch.bfloat16, 256)
    assert (against is None) == is_taken
    if against is not None:
        assert "pip install draftline[flash-attn]" in against


def test_triton_runs_on_able_gpus() -> None:
    gpu = Machine((9, 0), has_triton=True, has_flash_attn=False)
    assert runs_triton(gpu)
    assert not runs_triton(replace(gpu, capability=(7, 5)))
    assert not runs_triton(replace(gpu, has_triton=False))
    assert not runs_triton(replace(gpu, capability=None, is_interpreting=True))
