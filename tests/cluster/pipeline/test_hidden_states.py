"""Hidden states that a pipeline returns of texts are those of the whole model, of texts of any
length."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from draftline.cluster.pipeline.hidden_states import HiddenStateReader, cut_texts
from draftline.cluster.transport.stage_spec import Pipeline, StageSpec
from draftline.core.errors import ConfigError, StageError, StageLost
from draftline.models.load.partition import partition_layers
from draftline.models.stage.options import StageOptions
from hypothesis import given
from hypothesis import strategies as st
from support.fakes.message_pipeline import MessagePipeline
from support.tools.tiny_models import SIZES, VOCAB_SIZE, save_tiny_model
from transformers import AutoModelForCausalLM

BLOCK_SIZE, HIDDEN_SIZE = 4, SIZES["hidden_size"]
LAYERS = (-1, 1, 4, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama_deep", tmp_path_factory.mktemp("deep"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of which layers 3 and 7 keep keys and values, and the others states."""
    folder = tmp_path_factory.mktemp("hybrid")
    return save_tiny_model("qwen3_5_text", folder, num_layers=8)


def specs(
    folder: Path, num_blocks: int, dtype: str = "float32", quantization: str = "none",
    max_requests: int = 256,
) -> list[StageSpec]:  # fmt: skip
    """Of three stages; the layers that are read are in all of them."""
    options = StageOptions(
        feature_layers=LAYERS, quantization=quantization, max_requests=max_requests
    )
    return [
        StageSpec(
            model_path=str(folder), span=span, num_blocks=num_blocks, block_size=BLOCK_SIZE,
            hidden_size=HIDDEN_SIZE, dtype=dtype, options=options,
        )
        for span in partition_layers(folder, 3)
    ]  # fmt: skip


def reader(make_pipeline: Callable[[], Pipeline], **options: Any) -> HiddenStateReader:
    settings = {"block_size": BLOCK_SIZE, "max_rows": 16, "max_texts": 16, "step_timeout_s": 60.0}
    return HiddenStateReader(make_pipeline, LAYERS, HIDDEN_SIZE, **settings | options)


# The longest text has as many blocks as the smaller cache, and is in four steps.
@pytest.mark.parametrize(
    ("model", "num_blocks", "max_texts"),
    [("folder", 13, 16), ("folder", 40, 16), ("hybrid", 13, 16), ("hybrid", 40, 2)],
)
def test_states_are_those_of_the_whole_model(
    request: pytest.FixtureRequest, model: str, num_blocks: int, max_texts: int
) -> None:
    folder = request.getfixturevalue(model)
    lengths = [16, 3, 51, 1, 22, 7]
    tokens = torch.randint(VOCAB_SIZE, (6, 51), generator=torch.Generator().manual_seed(1))
    own = specs(folder, num_blocks, max_requests=max_texts)
    with reader(lambda: MessagePipeline(own), max_texts=max_texts) as states:
        first = states.launch(tokens, lengths)
        # Launched before the first is waited for.
        second = states.launch(tokens.flip(0), lengths[::-1])
        found, again = first(), second()
    torch.testing.assert_close(again.flip(0), found, atol=1e-4, rtol=1e-4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for text, length in enumerate(lengths):
        with torch.inference_mode():
            every = model(tokens[text : text + 1, :length], output_hidden_states=True).hidden_states
        expected = torch.cat([every[layer + 1][0] for layer in LAYERS], dim=-1)
        # A recurrence rounds otherwise than transformers' chunks.
        torch.testing.assert_close(found[text, :length], expected, atol=5e-4, rtol=5e-4)
        assert not found[text, length:].any()


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_stages_may_compute_otherwise(folder: Path, options: dict[str, str]) -> None:
    """In another dtype, and with rounded weights: near the exact states, and not them."""
    tokens = torch.randint(VOCAB_SIZE, (2, 20), generator=torch.Generator().manual_seed(1))
    states = []
    for own in (specs(folder, 16, **options), specs(folder, 16)):
        with reader(lambda used=own: MessagePipeline(used)) as one:
            states.append(one.launch(tokens, [20, 20])())
    found, exact = states
    assert found.dtype == torch.float32
    assert 0 < (found - exact).norm() < 0.1 * exact.norm()


class Stuck(MessagePipeline):
    """Answers one step, and no other."""

    def submit(self, step: Any) -> Any:
        if self.num_steps:
            return asyncio.get_running_loop().create_future()
        return super().submit(step)


class Failing(MessagePipeline):
    """A stage fails on each second step."""

    def submit(self, step: Any) -> Any:
        answer = super().submit(step)
        if self.num_steps % 2:
            return answer
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(StageError("stage 1 failed on a step"))
        return failed


def test_a_lost_stage_is_an_error(folder: Path) -> None:
    tokens = torch.ones(1, 40, dtype=torch.int64)
    with reader(lambda: MessagePipeline(specs(folder, 16), lost_at=[2])) as states:
        wait = states.launch(tokens, [40])
        with pytest.raises(StageLost, match="a stage is dead"):
            wait()
        with pytest.raises(StageLost):
            states.launch(tokens, [40])()


def test_a_stage_that_hangs_is_an_error(folder: Path) -> None:
    with reader(lambda: Stuck(specs(folder, 16)), step_timeout_s=0.2) as states:
        wait = states.launch(torch.ones(1, 40, dtype=torch.int64), [40])
        with pytest.raises(StageLost, match=r"0\.2 s \(step_timeout_s\)"):
            wait()


def test_a_step_that_fails_ends_no_other(folder: Path) -> None:
    with reader(lambda: Failing(specs(folder, 16))) as states:
        one_step = torch.ones(1, 16, dtype=torch.int64)
        states.launch(one_step, [16])()
        with pytest.raises(StageError, match="stage 1 failed"):
            states.launch(one_step, [16])()
        states.launch(one_step, [16])()


def test_a_pipeline_that_does_not_start_is_an_error() -> None:
    def lost() -> Pipeline:
        raise StageLost("no stage started")

    states = reader(lost)
    with pytest.raises(StageLost, match="no stage started"), states:
        pass
    assert not states._thread.is_alive()


def test_a_text_that_fits_no_cache_is_refused(folder: Path) -> None:
    with (
        reader(lambda: MessagePipeline(specs(folder, 2))) as states,
        pytest.raises(ConfigError, match="kv_cache_tokens: is 8, less than a text of 9 tokens"),
    ):
        states.launch(torch.ones(1, 9, dtype=torch.int64), [9])


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    max_rows=st.integers(1, 50),
    max_texts=st.integers(1, 5),
    num_spare=st.integers(0, 12),
)
def test_no_text_loses_its_cache_before_its_last_piece(
    lengths: list[int], max_rows: int, max_texts: int, num_spare: int
) -> None:
    num_blocks = -(-max(lengths) // BLOCK_SIZE) + num_spare
    done, owner = [0] * len(lengths), dict[int, int]()
    for pieces in cut_texts(lengths, max_rows, max_texts, num_blocks, BLOCK_SIZE):
        assert len(pieces) <= max_texts
        assert 0 < sum(piece.end - piece.start for piece in pieces) <= max_rows
        used = [block for piece in pieces for block in piece.blocks]
        assert len(set(used)) == len(used)
        assert set(used) <= set(range(num_blocks))
        for piece in pieces:
            assert piece.start == done[piece.text] < piece.end
            assert len(piece.blocks) * BLOCK_SIZE >= lengths[piece.text]
            assert not piece.start or all(owner[block] == piece.text for block in piece.blocks)
            done[piece.text] = piece.end
            owner.update(dict.fromkeys(piece.blocks, piece.text))
    assert done == lengths
