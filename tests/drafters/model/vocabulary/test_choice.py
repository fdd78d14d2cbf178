"""What the bundled drafters share with their target, and what `auto` makes of it."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.cli.main import app
from draftline.drafters.model.vocabulary.choice import (
    LEAST_COVERAGE,
    choose_vocabulary,
    read_overlap,
)
from draftline.models.load.model_info import read_model_info
from support.tools.pages import DOCS
from typer.testing import CliRunner

PAGE = DOCS / "drafters.md"
OTHERS = ("demo-drafter-other-vocab", "demo-drafter-bytes")


@pytest.mark.parametrize("drafter", OTHERS)
def test_the_page_says_what_the_bundled_tokenizers_share(drafter: str) -> None:
    info, target = read_model_info(drafter), read_model_info("demo")
    overlap = read_overlap(info, target)
    assert overlap is not None
    shared = overlap.shared
    [row] = re.findall(rf"^\| `{drafter}` \|.*$", PAGE.read_text("utf-8"), re.MULTILINE)
    told = [cell.strip() for cell in row.strip("|").split("|")][2:]
    assert told == [
        f"{len(shared.to_target):,}",
        f"{shared.num_shared:,}",
        f"{shared.num_shared / target.vocab_size:.0%}".replace("%", " %"),
        f"{overlap.coverage:.0%}".replace("%", " %"),
        f"{overlap.draws_per_token:.1f}",
        f"`{overlap.best}`",
    ]
    assert 0 < shared.num_shared < len(shared.to_draft), "part of the target's tokens is missing"
    same_ids = sum(target_id == own for own, target_id in enumerate(shared.to_target.tolist()))
    assert same_ids < 0.01 * shared.num_shared, "ids are others"


@pytest.mark.parametrize("drafter", OTHERS)
def test_auto_takes_what_doctor_shows_and_says_why(
    drafter: str, caplog: pytest.LogCaptureFixture
) -> None:
    info, target = read_model_info(drafter), read_model_info("demo")
    with caplog.at_level(logging.INFO):
        chosen = choose_vocabulary("auto", info, target, 6)
    overlap = read_overlap(info, target)
    assert overlap is not None
    assert chosen.name == overlap.best == "slem"
    reasons = list(overlap.describe(6))
    assert [message.partition(" ")[2] for message in caplog.messages] == [
        *reasons,
        "vocabulary=slem",
    ]
    shown = CliRunner().invoke(
        app, ["doctor", "--model", "demo", "--drafter", drafter], env={"COLUMNS": "300"}
    )
    assert shown.exit_code == 0, shown.output
    for line in (f"{overlap.shared.num_shared} tokens are in both", "auto takes slem"):
        assert line in shown.output


def test_auto_takes_shared_tokens_where_most_of_a_text_is_made_of_them() -> None:
    overlap = read_overlap(read_model_info(OTHERS[0]), read_model_info("demo"))
    assert overlap is not None
    assert replace(overlap, coverage=LEAST_COVERAGE).best == "tli"
    assert replace(overlap, coverage=LEAST_COVERAGE - 0.01).best == "slem"


def test_the_same_tokenizer_needs_no_choice_and_another_is_not_the_same() -> None:
    target = read_model_info("demo")
    drafter = read_model_info("demo-drafter")
    assert read_overlap(drafter, target) is None
    assert choose_vocabulary("auto", drafter, target, 6).name == "same"
    with pytest.raises(ConfigError, match=r"^vocabulary: .* has another tokenizer"):
        choose_vocabulary("same", read_model_info(OTHERS[0]), target, 6)
