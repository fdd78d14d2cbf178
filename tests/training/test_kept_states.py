"""Hidden states that are kept for later epochs: equal each time, within their room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftline.models.load.model_info import read_model_info
from draftline.training.heads.kept_states import KeptStates
from draftline.training.heads.trainer import read_losses, train_head
from support.inputs.tiny_heads import PLAN, eagle3, texts
from support.tools.tiny_models import save_tiny_model
from torch import Tensor

WIDTH = 4


class Counted:
    """Numbers that depend on the tokens; counts the texts that it is asked for."""

    layers = (0, 1)

    def __init__(self) -> None:
        self.asked = 0

    def launch(self, tokens: Tensor, lengths: Sequence[int]) -> Callable[[], Tensor]:
        self.asked += len(lengths)
        values = (tokens[..., None] * torch.pi + torch.arange(WIDTH)).float()
        return lambda: values


def test_a_text_is_computed_once_and_read_as_it_was() -> None:
    source = Counted()
    kept = KeptStates(source, 10_000)
    assert kept.layers == (0, 1)
    tokens, lengths = torch.tensor([[3, 1, 4, 0], [1, 5, 9, 2]]), [3, 4]
    first = kept.launch(tokens, lengths)()
    assert torch.equal(first[0], first[0].bfloat16().float()), "rounded the first time, too"
    assert source.asked == 2
    # In another order, beside a text that is new, and longer by what fills it up.
    again = kept.launch(
        torch.tensor([[1, 5, 9, 2, 0], [7, 7, 0, 0, 0], [3, 1, 4, 0, 0]]), [4, 2, 3]
    )
    found = again()
    assert source.asked == 3
    assert torch.equal(found[0, :4], first[1])
    assert torch.equal(found[2, :3], first[0, :3])
    assert torch.equal(found[1, 0], (7 * torch.pi + torch.arange(WIDTH)).bfloat16().float())
    assert torch.isfinite(found).all()


def test_texts_beyond_the_room_are_computed_each_time() -> None:
    source = Counted()
    kept = KeptStates(source, 3 * WIDTH * 2)
    tokens, lengths = torch.tensor([[3, 1, 4], [1, 5, 9]]), [3, 3]
    first = kept.launch(tokens, lengths)()
    assert torch.equal(kept.launch(tokens, lengths)(), first)
    assert source.asked == 3, "one of the two is kept"


@pytest.mark.parametrize("room", [200, 2**20])
def test_a_run_with_kept_states_trains_all_epochs_on_them(tmp_path: Path, room: int) -> None:
    checkpoint = save_tiny_model("llama", tmp_path / "tiny")
    distilled = texts(read_model_info(checkpoint).vocab_size)
    plan = replace(PLAN, num_steps=12)
    train_head(eagle3(checkpoint), checkpoint, distilled, plan, tmp_path / "computed")
    kept = replace(plan, kept_bytes=room)
    train_head(eagle3(checkpoint), checkpoint, distilled, kept, tmp_path / "kept")
    losses = [read_losses(tmp_path / name) for name in ("computed", "kept")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2), "but for 16 bits"
