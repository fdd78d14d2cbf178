"""`draftline train`: a target's own texts, then a head that loads and fits it."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.cli.main import app
from draftline.deploy.cli.train import fit
from draftline.deploy.cli.train.command import KINDS
from draftline.deploy.cli.train.fit import mask_token, pair_layers, tapped_layers
from draftline.deploy.cli.train.job import OWN_FLAGS, HeadJob, head_job
from draftline.deploy.cli.train.recipes import RECIPES, head_plan, head_recipe
from draftline.models.heads.feature_head_config import FeatureHeadConfig
from draftline.models.heads.load_head import load_head
from draftline.models.heads.p_eagle import PEagleConfig
from draftline.models.heads.spec_former import SpecFormerConfig
from draftline.training.corpus import SourceFile
from draftline.training.heads.distilled_texts import DistilledText, TextFolder, read_texts
from draftline.training.heads.feature_passes import LossWeights
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
    distilled = read_texts(texts)
    assert len(distilled) == 40
    assert all(0 < text.num_prompt < len(text.tokens) <= text.num_prompt + 8 for text in distilled)
    # Ten prompts came twice, and were answered otherwise.
    again = [(distilled[index], distilled[index + 30]) for index in range(10)]
    assert all(one.tokens[: one.num_prompt] == two.tokens[: two.num_prompt] for one, two in again)
    assert any(one.tokens != two.tokens for one, two in again)


# One of each way to train; the others in the whole matrix.
WAYS = {"griffin", "specformer", "medusa", "dspark", "p_eagle"}
HEADS = [kind for kind in KINDS if kind != "model"]


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in WAYS else pytest.mark.full) for kind in HEADS],
)
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


def test_layers_and_drafts_of_a_p_eagle_drafter(
    texts: Path, checkpoint: Path, tmp_path: Path
) -> None:
    output = tmp_path / "head"
    command = [
        "train", "p_eagle", "--texts", str(texts), "--output", str(output), "--model",
        str(checkpoint), "--num-steps", "1", "--texts-per-step", "1", "--draft-vocab-size", "20",
        "--feature-layers", "-1,0", "--num-layers", "1", "--draft-length", "3", "--keep-rate", "1",
    ]  # fmt: skip
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    config = load_head(output).config
    assert isinstance(config, PEagleConfig)
    assert (config.feature_layers, config.draft_vocab_size) == ((-1, 0), 20)
    assert (config.num_layers, config.draft_length, config.has_embedding) == (1, 3, True)
    used = {token for text in read_texts(texts) for token in text.tokens}
    assert config.mask_token not in used
    record = json.loads((output / "training.json").read_text())
    assert len(record["acceptance_by_depth"]) == 3
    assert record["plan"]["masks"]["keep_rate"] == 1


def test_a_low_a_middle_and_a_high_layer() -> None:
    assert pair_layers(32) == (1, 15, 28)
    assert pair_layers(6) == (1, 3, 5)
    assert pair_layers(3) == (0, 1, 2)
    assert pair_layers(2) == (-1, 0, 1)
    assert pair_layers(1) == (-1, 0)


@pytest.mark.parametrize(
    ("kind", "field", "flag"),
    [
        ("griffin", "bidirectional", "--no-bidirectional"),
        ("specformer", "feature_layers", "--feature-layers=1,2"),
        ("specformer", "fusion", "--fusion=linear"),
        ("eagle3", "splits_output", "--splits-output"),
        ("dflash", "draft_vocab_size", "--draft-vocab-size=10"),
        ("dflash", "num_passes", "--num-passes=3"),
        ("eagle2", "draft_length", "--draft-length=3"),
        ("p_eagle", "num_anchors", "--num-anchors=32"),
        ("hass", "num_layers", "--num-layers=2"),
        ("eagle3", "markov_kind", "--markov-kind=rnn"),
        ("dspark", "keep_rate", "--keep-rate=0.5"),
        ("griffin", "divergence", "--divergence=reverse"),
        ("model", "draft_length", "--draft-length=3"),
    ],
)
def test_flags_of_other_kinds_are_refused(kind: str, field: str, flag: str) -> None:
    result = runner.invoke(app, ["train", kind, "--texts", "none", "--output", "none", flag])
    assert isinstance(result.exception, ConfigError)
    message = str(result.exception)
    assert message.startswith(f"{field}: ")
    assert f"train {', '.join(OWN_FLAGS[field])};" in message
    assert f"leave {flag.partition('=')[0].replace('--no-', '--')} out of train {kind}" in message


@pytest.mark.parametrize("kind", KINDS)
def test_the_help_of_a_kind_has_its_own_flags_alone(kind: str) -> None:
    shown = set(re.findall(r"^ +(--[a-z-]+)", runner.invoke(app, ["train", kind, "--help"]).output,
                           re.MULTILINE))  # fmt: skip
    assert {"--texts", "--num-steps", "--seed"} < shown
    for field, kinds in OWN_FLAGS.items():
        assert (f"--{field.replace('_', '-')}" in shown) is (kind in kinds), field


def test_own_flags_are_of_fields_and_kinds_that_there_are() -> None:
    names = {field.name for field in fields(HeadJob)}
    assert names >= OWN_FLAGS.keys()
    assert RECIPES.keys() >= {kind for kinds in OWN_FLAGS.values() for kind in kinds}


def test_a_recipe_is_followed_where_nothing_is_said() -> None:
    def plan(kind: str, **own: Any):
        job = head_job(kind, {"texts": Path(), "output": Path(), **own})
        return head_plan(job, head_recipe(kind, job), 4096).passes

    assert RECIPES.keys() == KINDS.keys()
    assert (plan("griffin").num_passes, plan("griffin").num_aligned) == (3, 3)
    assert (plan("hass").num_passes, plan("hass").num_aligned) == (3, 0)
    assert plan("eagle2").num_passes == 1
    assert (plan("hass").weights.best_tokens, plan("hass").weights.num_best) == (1.0, 10)
    assert plan("hass", num_best=100).weights == LossWeights(best_tokens=1.0, num_best=100)
    assert plan("griffin", best_weight=0.0).weights == LossWeights(best_tokens=0.0)
    assert plan("griffin", feature_weight=0.0).weights == LossWeights(feature=0.0)
    assert (plan("griffin", num_passes=2, num_aligned=0).num_passes) == 2
    assert (plan("griffin", num_passes=2, num_aligned=0).num_aligned) == 0


def test_an_initial_head_says_how_large_it_is(
    texts: Path, checkpoint: Path, tmp_path: Path
) -> None:
    def command(kind: str, *flags: str) -> list[str]:
        return [
            "train", kind, "--texts", str(texts), "--model", str(checkpoint), "--num-steps", "1",
            "--texts-per-step", "1", "--output", str(tmp_path / f"head{len(flags)}"), *flags,
        ]  # fmt: skip

    narrow = runner.invoke(app, command("griffin", "--intermediate-size", "12"))
    assert narrow.exit_code == 0, narrow.output
    initial = "--initial-head", str(tmp_path / "head2")
    result = runner.invoke(app, command("griffin", *initial, "--seed", "1"))
    assert result.exit_code == 0, result.output
    config = load_head(tmp_path / "head4").config
    assert isinstance(config, FeatureHeadConfig)
    assert config.intermediate_size == 12
    assert json.loads((tmp_path / "head4" / "training.json").read_text())["initial_head"]
    refused = runner.invoke(app, command("griffin", *initial, "--intermediate-size", "9"))
    assert "intermediate_size: is that of the initial head" in str(refused.exception)
    other = runner.invoke(app, command("eagle3", *initial))
    assert "is no eagle3 head" in str(other.exception)


def test_published_recipes_are_followed() -> None:
    def plan(kind: str, width: int = 4096, **own: Any):
        job = head_job(kind, {"texts": Path(), "output": Path(), **own})
        recipe = head_recipe(kind, job)
        return recipe, head_plan(job, recipe, width)

    recipe, paper = plan("griffin", recipe="paper")
    assert recipe.has_paper_fusion
    assert (paper.rate.peak, paper.rate.warmup_steps, paper.window) == (3e-5, 2000, 2048)
    assert (paper.passes.num_passes, paper.passes.num_aligned) == (3, 3)
    assert paper.passes.weights == LossWeights(0.1, 1.0, 0.0, is_l1=True, is_one_hot=True)
    recipe, released = plan("griffin", recipe="released", peak_lr=1e-4, best_weight=0.2)
    assert not recipe.has_paper_fusion
    assert (released.rate.peak, released.rate.warmup_steps) == (1e-4, 2000)
    assert released.passes.mask_form == "code"
    assert released.passes.weights == LossWeights(best_tokens=0.2)
    recipe, former = plan("specformer", recipe="paper")
    assert (former.eps, former.texts_per_step, former.rate.final) == (1e-2, 64, 1e-5)
    assert recipe.is_bidirectional
    assert not plan("specformer", recipe="released")[0].is_bidirectional
    assert plan("specformer", recipe="released", bidirectional=True)[0].is_bidirectional
    # Else the rate follows the target's width.
    assert [plan("griffin", width)[1].rate.peak for width in (64, 576, 4096, 8192)] == (
        pytest.approx([1e-3, 3.56e-4, 5e-5, 2.5e-5], rel=1e-2)
    )
    with pytest.raises(ConfigError, match="recipe"):
        plan("eagle3", recipe="paper")


def test_too_few_texts_are_refused(tmp_path: Path, checkpoint: Path) -> None:
    TextFolder(tmp_path, {}).add(0, [DistilledText((1, 2, 3, 4), ((2, 4),))] * 5)
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
    distilled = [
        DistilledText((1, 5, 2, 4), ((2, 4),)),
        DistilledText((4, 4, 0, 1, 5, 5), ((1, 6),)),
    ]
    assert mask_token(distilled, 8, end=None) == 7
    assert mask_token(distilled, 8, end=7) == 6
    assert mask_token(distilled, 6, end=3) == 2, "all are used: the last of the rarest"
