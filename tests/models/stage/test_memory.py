"""How many KV blocks a GPU is given, from what a stage is seen to use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.models import device
from draftline.models.device import free_host_memory
from draftline.models.load.partition import LayerSpan
from draftline.models.stage.gpu_path import GraphOptions
from draftline.models.stage.gpu_start import GIB, SLACK_BYTES, fitting_blocks
from draftline.models.stage.load_stage import load_stage
from draftline.models.stage.options import StageOptions
from draftline.models.stage.stage import Stage
from support.tools.tiny_models import save_tiny_model

BLOCK_SIZE = 4
# Keys and values of 4 layers, 2 heads of 8 float32 numbers.
BLOCK_BYTES = 2 * 4 * 2 * 8 * 4 * BLOCK_SIZE
GRAPHS = GraphOptions(max_rows=8, max_requests=2, max_positions=64)


@dataclass
class FakeMemory:
    """A GPU of 16 GiB on which others use 1 GiB, and a step takes what is said."""

    weights: int
    step: int
    trial: int
    has_begun: bool = False

    def begin_peak(self) -> None:
        self.has_begun = True

    def peak(self) -> int:
        assert self.has_begun
        return self.weights + self.trial + self.step

    def allocated(self) -> int:
        return self.weights + self.trial

    def free_and_total(self) -> tuple[int, int]:
        return 15 * GIB - self.weights - self.trial, 16 * GIB


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def blocks(folder: Path, memory: FakeMemory, options: StageOptions, first: int = 0) -> int:
    made: list[int] = []

    def stage_of(num_blocks: int) -> Stage:
        made.append(num_blocks)
        return load_stage(folder, LayerSpan(first, 4, 4), num_blocks, BLOCK_SIZE)

    found = fitting_blocks(stage_of, BLOCK_SIZE, options, memory)
    assert made == [3]  # for the 10 rows of the largest step
    return found


def test_the_cache_fills_what_weights_and_steps_leave(folder: Path) -> None:
    memory = FakeMemory(weights=4 * GIB, step=2 * GIB, trial=3 * BLOCK_BYTES)
    left = 16 * GIB * 9 // 10 - 5 * GIB - SLACK_BYTES
    options = StageOptions(max_rows=10)
    assert blocks(folder, memory, options) == pytest.approx((left - 2 * GIB) / BLOCK_BYTES, abs=1)
    options = StageOptions(max_rows=10, graphs=GRAPHS)
    assert blocks(folder, memory, options) == pytest.approx((left - 4 * GIB) / BLOCK_BYTES, abs=1)


def test_a_later_stage_is_run_on_hidden_states(folder: Path) -> None:
    memory = FakeMemory(weights=4 * GIB, step=2 * GIB, trial=3 * BLOCK_BYTES // 2)
    options = StageOptions(max_rows=10, gpu_memory_utilization=0.5)
    left = 8 * GIB - 5 * GIB - 2 * GIB - SLACK_BYTES
    found = blocks(folder, memory, options, first=2)
    assert found == pytest.approx(left / (BLOCK_BYTES // 2), abs=1)


def test_no_room_is_an_error_that_says_what_to_do(folder: Path) -> None:
    memory = FakeMemory(weights=13 * GIB, step=2 * GIB, trial=3 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization: of 0.9 .* 14.0 are taken"):
        blocks(folder, memory, StageOptions(max_rows=10))


def test_states_are_counted_before_the_cache(tmp_path: Path) -> None:
    """A stage of layers that keep states measures the largest step, too."""
    hybrid = save_tiny_model("qwen3_next", tmp_path)
    # One of its layers has keys and values.
    memory = FakeMemory(weights=4 * GIB, step=2 * GIB, trial=3 * BLOCK_BYTES // 4)
    left = 16 * GIB * 9 // 10 - 5 * GIB - SLACK_BYTES - 2 * GIB
    found = blocks(hybrid, memory, StageOptions(max_rows=10))
    assert found == pytest.approx(left / (BLOCK_BYTES // 4), abs=1)
    memory.weights = 13 * GIB
    with pytest.raises(ConfigError, match=r"of these by states of max_num_seqs.*or max_num_seqs"):
        blocks(hybrid, memory, StageOptions(max_rows=10))


@pytest.mark.parametrize("field", ["max_requests", "num_snapshots", "num_kept_rows"])
def test_states_without_room_name_their_settings(field: str, tmp_path: Path) -> None:
    hybrid = save_tiny_model("qwen3_next", tmp_path)
    options = StageOptions(max_rows=10, **{field: 10**13})
    with pytest.raises(ConfigError, match=r"max_num_seqs: takes .* tree_nodes") as raised:
        load_stage(hybrid, LayerSpan(0, 4, 4), 4, BLOCK_SIZE, options=options)
    assert raised.value.field == "max_num_seqs"


@pytest.mark.parametrize(
    ("free", "field"), [(50_000, "max_num_seqs"), (5_000_000, "kv_cache_tokens")]
)
def test_a_host_without_room_names_the_setting(
    free: int, field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hybrid = save_tiny_model("qwen3_next", tmp_path)
    monkeypatch.setattr("draftline.models.stage.plain_path.free_host_memory", lambda: free)
    with pytest.raises(ConfigError) as raised:
        load_stage(
            hybrid, LayerSpan(0, 4, 4), 20_000, BLOCK_SIZE, options=StageOptions(max_rows=10)
        )
    assert raised.value.field == field


def test_a_container_has_what_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everywhere = free_host_memory()
    monkeypatch.setattr(device, "CGROUP", tmp_path)
    assert free_host_memory() == pytest.approx(everywhere, rel=0.3)
    for name, text in {
        "memory.max": "70000", "memory.current": "50000", "memory.stat": "anon 9\nfile 30000\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
    assert free_host_memory() == 50000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_memory() == pytest.approx(everywhere, rel=0.3)


@pytest.mark.gpu
def test_the_cache_of_a_gpu_is_as_large_as_the_setting_says(folder: Path) -> None:
    options = StageOptions(max_rows=10, gpu_memory_utilization=0.5, graphs=GRAPHS)
    stage = load_stage(
        folder, LayerSpan(0, 4, 4), None, BLOCK_SIZE, "bfloat16", device="cuda", options=options
    )
    free, total = torch.cuda.mem_get_info()
    assert 0.3 < (total - free) / total <= 0.5
    assert stage.kv.data.nbytes == stage.num_blocks * BLOCK_BYTES // 2
