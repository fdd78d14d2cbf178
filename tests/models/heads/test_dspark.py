"""DSpark checkpoints: their layouts, their heads, and what is missing. `block_logits.py` in
`tests/support/inputs/` has the formulas, which drafters are tested against.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from draftline.core.errors import CheckpointError
from draftline.models.heads.dspark import DSpark, DSparkConfig
from draftline.models.heads.load_head import load_head, load_readings
from support.inputs import head_checkpoints as published

SPECULATORS: dict[str, Any] = published.SPECULATORS_DFLASH | {"speculators_model_type": "dspark"}


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_kinds_are_told_by_their_tensors(tmp_path: Path, kind: str) -> None:
    folder = published.save(tmp_path, published.dspark(kind), published.DSPARK)
    head = load_head(folder)
    assert isinstance(head, DSpark)
    assert head.state_dict().keys() == published.dspark(kind).keys()
    config = head.config
    assert isinstance(config, DSparkConfig)
    assert (config.markov_kind, config.markov_rank) == (kind, published.RANK)
    assert config.feature_layers == (-1, 3)
    # Row 0 drafts, too.
    assert (config.is_shifted, config.draft_length) == (True, 3)


def test_a_drafter_that_adds_nothing_is_a_shifted_dflash(tmp_path: Path) -> None:
    folder = published.save(tmp_path, published.dflash(), published.DSPARK | {"markov_rank": 0})
    head = load_head(folder)
    assert isinstance(head, DSpark)
    assert head.markov_head is None
    assert head.config.draft_length == 3


@pytest.mark.parametrize("is_shifted", [True, False])
def test_a_file_of_speculators_says_its_layout(tmp_path: Path, *, is_shifted: bool) -> None:
    shapes = published.dflash_of_speculators() | {
        "markov_head.markov_w1.weight": (published.VOCAB, published.RANK),
        "markov_head.markov_w2.weight": (published.DRAFT_VOCAB, published.RANK),
    }
    said = published.save(
        tmp_path / "said", shapes, SPECULATORS | {"sample_from_anchor": is_shifted}
    )
    config = load_head(said).config
    assert (config.draft_length, config.block_size) == (3, 3 if is_shifted else 4)
    unsaid = load_readings(published.save(tmp_path / "unsaid", shapes, SPECULATORS))
    assert [one.reading for one in unsaid] == [
        {"sample_from_anchor": True},
        {"sample_from_anchor": False},
    ]
    assert [one.head.config.draft_length for one in unsaid] == [3, 3]
    assert [one.head.config.block_size for one in unsaid] == [3, 4]
    # One set of weights serves both.
    weights = [one.head.fc.weight for one in unsaid]
    assert weights[0].data_ptr() == weights[1].data_ptr()


@pytest.mark.parametrize(
    ("name", "shape", "named"),
    [
        ("markov_head.markov_w2.weight", None, r"markov_w2\.weight is missing"),
        ("markov_head.markov_w2.weight", (40, 5), r"shape \(40, 5\) instead of \(40, 6\)"),
        ("markov_head.other.weight", (4, 4), r"markov_head\.other\.weight is unknown"),
        ("confidence_head.proj.bias", None, r"confidence_head\.proj\.bias is missing"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, name: str, shape: tuple[int, ...] | None, named: str
) -> None:
    shapes: dict[str, Any] = {**published.dspark(), name: shape}
    kept = {name: shape for name, shape in shapes.items() if shape is not None}
    with pytest.raises(CheckpointError, match=named):
        load_head(published.save(tmp_path, kept, published.DSPARK))
