"""`draftline train`: a target's own texts, then a head that loads and fits it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.cli.main import app
from draftline.deploy.cli.train import fit
from draftline.deploy.cli.train.command import KINDS
from draftline.deploy.cli.train.head_config import mask_token, pair_layers, tapped_layers
from draftline.deploy.cli.train.job import RECIPES, HeadJob, head_plan, head_recipe
from draftline.models.heads.formats.feature_head_config import FeatureHeadConfig
from draftline.models.heads.load_head import load_head
from draftline.models.heads.spec_former import SpecFormerConfig
from draftline.training.corpus import SourceFile
from draftline.training.heads.distilled_texts import DistilledText, TextFolder, read_texts
from typer.testing import CliRunner

runner = CliRunner()


@pytest.fixture(scope="module")
def texts(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty texts, of which the command was asked for in two goes."""
    folder = tmp_path_factory.mktemp("train")
    rows = [json.dumps({"name": str(index), "prompt": f"def f{index}(x):"}) for index in range(30)]
    (folder / "prompts.jsonl").write_text("\n".join(rows))
    for count in ("20", "40"):
        result = runner.invoke(
            app,
            [
                "train", "data", "--model", str(checkpoint), "--output", str(folder / "texts"),
                "--prompts", str(folder / "prompts.jsonl"), "--num-texts", count,
                "--max-tokens", "8",
            ],
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert f"{count} texts in" in result.output
    return folder / "texts"


def test_texts_are_what_the_target_says(texts: Path) -> None:
    said = read_texts(texts)
    assert len(said) == 40
    assert all(0 < text.num_prompt < len(text.tokens) <= text.num_prompt + 8 for text in said)
    # Ten prompts came twice, and were answered otherwise.
    again = [(said[index], said[index + 30]) for index in range(10)]
    assert all(one.tokens[: one.num_prompt] == two.tokens[: two.num_prompt] for one, two in again)
    assert any(one.tokens != two.tokens for one, two in again)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_trained_and_fits_its_target(
    texts: Path, checkpoint: Path, tmp_path: Path, kind: str
) -> None:
    output = tmp_path / kind
    command = [
        "train", kind, "--texts", str(texts), "--output", str(output), "--model", str(checkpoint),
        "--num-steps", "3", "--texts-per-step", "2",
    ]  # fmt: skip
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "accepted at each depth" in result.output
    record = json.loads((output / "training.json").read_text())
    assert (record["kind"], record["steps"], record["texts"]) == (kind, 3, 40)
    config = load_head(output).config
    assert getattr(config, "fusion", None) == RECIPES[kind].fusion
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    doctor = runner.invoke(app, ["doctor", "--drafter", str(output), "--model", str(checkpoint)])
    assert doctor.exit_code == 0, doctor.output
    # Nothing is left to do: it is written again.
    assert runner.invoke(app, command).exit_code == 0


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--fusion", "linear"), ("linear", True)),
        (("--no-splits-output",), ("guided", False)),
    ],
)
def test_parts_of_a_griffin_are_left_out(
    texts: Path, checkpoint: Path, tmp_path: Path, flags: tuple[str, ...], wanted: object
) -> None:
    output = tmp_path / "head"
    command = [
        "train", "griffin", "--texts", str(texts), "--output", str(output), "--model",
        str(checkpoint), "--num-steps", "1", "--texts-per-step", "1", *flags,
    ]  # fmt: skip
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    config = load_head(output).config
    assert isinstance(config, FeatureHeadConfig)
    assert (config.fusion, config.splits_output) == wanted


def test_a_spec_formers_drafts_see_those_before_them_alone(
    texts: Path, checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "head"
    command = [
        "train", "specformer", "--texts", str(texts), "--output", str(output), "--model",
        str(checkpoint), "--num-steps", "1", "--texts-per-step", "1", "--no-bidirectional",
    ]  # fmt: skip
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    config = load_head(output).config
    assert isinstance(config, SpecFormerConfig)
    assert not config.is_bidirectional


def test_texts_of_own_prompts_have_no_file_to_go_on_from(
    texts: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [SourceFile("stdlib/one.py", "x = 1\n")]
    monkeypatch.setattr(fit, "training_files", lambda *, more: files)
    command = [
        "train", "specformer", "--texts", str(texts), "--output", str(tmp_path), "--model",
        str(checkpoint), "--num-steps", "1", "--no-self-distillation",
    ]  # fmt: skip
    result = runner.invoke(app, command)
    assert isinstance(result.exception, ConfigError)
    assert "self_distillation" in str(result.exception)


def test_layers_and_vocabulary_of_an_eagle3_head(
    texts: Path, checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "head"
    command = [
        "train", "eagle3", "--texts", str(texts), "--output", str(output), "--model",
        str(checkpoint), "--num-steps", "1", "--texts-per-step", "1", "--draft-vocab-size", "20",
        "--feature-layers", "-1,0",
    ]  # fmt: skip
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    config = load_head(output).config
    assert isinstance(config, FeatureHeadConfig)
    assert (config.feature_layers, config.draft_vocab_size) == ((-1, 0), 20)
    assert config.has_token_map
    wrong = runner.invoke(app, [*command[:-1], "low"])
    assert "feature_layers" in str(wrong.exception)
    more = runner.invoke(app, [*command, "--draft-vocab-size", "100000"])
    assert "draft_vocab_size" in str(more.exception)


def test_a_low_a_middle_and_a_high_layer() -> None:
    assert pair_layers(32) == (1, 15, 28)
    assert pair_layers(6) == (1, 3, 5)
    assert pair_layers(3) == (0, 1, 2)
    assert pair_layers(2) == (-1, 0, 1)
    assert pair_layers(1) == (-1, 0)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("griffin", "bidirectional", False),
        ("specformer", "feature_layers", "1,2"),
        ("dflash", "draft_vocab_size", 10),
        ("dflash", "markov_rank", 10),
        ("eagle3", "markov_kind", "rnn"),
    ],
)
def test_flags_of_other_kinds_are_refused(kind: str, field: str, value: Any) -> None:
    job = HeadJob(texts=Path(), output=Path(), **{field: value})
    with pytest.raises(ConfigError, match=f"{field}.*leave it out of train {kind}"):
        head_recipe(kind, job)


@pytest.mark.parametrize("kind", ["specformer", "eagle3"])
def test_other_heads_have_no_fusion(kind: str) -> None:
    job = HeadJob(texts=Path(), output=Path(), fusion="linear")
    with pytest.raises(ConfigError, match=f"{kind} is none"):
        head_recipe(kind, job)


def test_a_recipe_is_followed_where_nothing_is_said() -> None:
    def plan(kind: str, **fields: int):
        job = HeadJob(texts=Path(), output=Path(), **fields)
        return head_plan(job, RECIPES[kind]).passes

    assert RECIPES.keys() == KINDS.keys()
    assert (plan("griffin").num_passes, plan("griffin").num_aligned) == (3, 3)
    assert (plan("hass").num_passes, plan("hass").num_aligned) == (3, 0)
    assert plan("eagle2").num_passes == 1
    assert (plan("griffin", num_passes=2, num_aligned=0).num_passes) == 2
    assert (plan("griffin", num_passes=2, num_aligned=0).num_aligned) == 0


def test_too_few_texts_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    TextFolder(tmp_path, {}).add([DistilledText((1, 2, 3, 4), 2)] * 5)
    result = runner.invoke(
        app,
        [
            "train", "griffin", "--texts", str(tmp_path), "--output", str(tmp_path / "head"),
            "--model", str(checkpoint),
        ],
    )  # fmt: skip
    assert isinstance(result.exception, ConfigError)
    assert "has 5 texts, of which 32 are held out" in str(result.exception)


def test_a_block_drafter_reads_its_targets_last_states_where_there_are_few() -> None:
    assert tapped_layers(36) == (1, 9, 17, 25, 33)
    assert tapped_layers(6) == (1, 3, 5)
    assert tapped_layers(3) == (2,)
    assert tapped_layers(1) == (0,)


def test_the_mask_is_a_token_that_the_texts_do_not_have() -> None:
    said = [DistilledText((1, 5, 2, 4), 2), DistilledText((4, 4, 0, 1, 5, 5), 1)]
    assert mask_token(said, 8, end=None) == 7
    assert mask_token(said, 8, end=7) == 6
    assert mask_token(said, 6, end=3) == 2, "all are used: the last of the rarest"
