"""`draftline train model`: a student begins, is trained, and is written as a model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draftline import Engine, EngineConfig, SamplingParams
from draftline.core.errors import ConfigError
from draftline.deploy.cli.main import app
from draftline.deploy.cli.train.job import HeadJob
from draftline.deploy.cli.train.student import student_config
from draftline.training.heads.distilled_texts import DistilledText, TextFolder
from draftline.training.heads.student import StudentConfig
from support.inputs.tiny_heads import uneven_texts
from support.tools.tiny_tokenizers import byte_level_bpe
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from typer.testing import CliRunner, Result

runner = CliRunner()
TEXTS = uneven_texts(256)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts")
    folder = TextFolder(path, {})
    for index, text in enumerate(TEXTS):
        folder.add(index, [text])
    return path


def save_model(folder: Path, rows: int, tokenizer: Any) -> Path:
    """A model with this tokenizer, so many embeddings and a short context."""
    config = LlamaConfig(
        vocab_size=rows, hidden_size=24, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
        tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def train(texts: Path, checkpoint: Path, output: Path, *flags: str) -> Result:
    return runner.invoke(
        app,
        [
            "train", "model", "--texts", str(texts), "--output", str(output), "--model",
            str(checkpoint), "--num-steps", "3", "--texts-per-step", "2", *flags,
        ],
    )  # fmt: skip


def test_a_student_is_trained_and_fits_its_target(
    texts: Path, checkpoint: Path, tmp_path: Path
) -> None:
    """With padded embeddings and a shorter context than the target's."""
    begun = save_model(tmp_path / "begun", 300, AutoTokenizer.from_pretrained(checkpoint))
    output = tmp_path / "student"
    flags = ("--student", str(begun), "--divergence", "both", "--keep-states-gib", "0.01")
    result = train(texts, checkpoint, output, *flags)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "accepted at each depth" in result.output
    assert f"model in {output}" in result.output
    record = json.loads((output / "training.json").read_text())
    assert (record["kind"], record["steps"], record["texts"]) == ("model", 3, 40)
    assert record["student"] == {"folder": str(begun), "layers": [], "vocab_size": 256}
    assert (record["plan"]["divergence"], record["plan"]["window"]) == ("both", 32)
    assert record["plan"]["rate"]["peak"] == 1e-3
    assert len(record["acceptance_by_depth"]) == 6
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((output / "config.json").read_text())
    assert (config["vocab_size"], config["dtype"]) == (256, "bfloat16")
    # Nothing is left to do: it is written again.
    assert train(texts, checkpoint, output, *flags).exit_code == 0
    doctor = runner.invoke(app, ["doctor", "--drafter", str(output), "--model", str(checkpoint)])
    assert doctor.exit_code == 0, doctor.output
    # And it is a target.
    with Engine(EngineConfig(model=str(output), drafters=())) as engine:
        [said] = engine.generate(["def"], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(said.token_ids) == 4


def test_a_student_of_layers_is_trained(texts: Path, checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "student"
    result = train(texts, checkpoint, output, "--layers", "0,2,3", "-pp", "2")
    assert result.exit_code == 0, (result.output, result.exception)
    written = AutoModelForCausalLM.from_pretrained(output)
    assert (written.config.num_hidden_layers, written.dtype) == (3, torch.bfloat16)
    assert written.config.tie_word_embeddings


def test_a_dry_run_trains_no_student(texts: Path, checkpoint: Path, tmp_path: Path) -> None:
    result = train(texts, checkpoint, tmp_path / "student", "--layers", "1", "--dry-run")
    assert result.exit_code == 0, (result.output, result.exception)
    assert "trained: model, " in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ((), "student: give either --student, or --layers"),
        (("--student", "demo", "--layers", "1"), "student: give either --student, or --layers"),
        (("--student", "demo"), "student: demo has another tokenizer than"),
        (("--layers", "2,1"), "layers: are ascending numbers from 0 to 3"),
        (("--layers", "1,1"), "layers: "),
        (("--layers", "0,4"), "layers: "),
        (("--layers", "-1,0"), "layers: "),
        (("--layers", "low"), "layers: .*'low'"),
        (("--layers", ""), "layers: "),
    ],
)
def test_students_that_are_none_are_refused(
    texts: Path, checkpoint: Path, tmp_path: Path, flags: Sequence[str], named: str
) -> None:
    result = train(texts, checkpoint, tmp_path / "student", *flags)
    assert isinstance(result.exception, ConfigError), result.output
    assert re.match(named, str(result.exception))
    assert not list(tmp_path.iterdir())


def test_students_have_the_rows_that_their_target_has_too(checkpoint: Path, tmp_path: Path) -> None:
    own = AutoTokenizer.from_pretrained(checkpoint)

    def config(rows: int, said: Sequence[DistilledText], tokenizer: Any = None) -> StudentConfig:
        folder = save_model(tmp_path / "student", rows, tokenizer or own)
        job = HeadJob(texts=Path(), output=Path(), model=str(checkpoint), student=str(folder))
        return student_config(checkpoint, job, said)

    assert config(300, TEXTS).vocab_size == 256
    few = [DistilledText((1, 2, 249), ((1, 3),))]
    assert config(250, few).vocab_size == 250
    with pytest.raises(ConfigError, match=r"student: .* embeddings of 249 tokens.* token 249"):
        config(249, few)
    with pytest.raises(ConfigError, match=r"student: .* another tokenizer"):
        config(330, few, byte_level_bpe())


@pytest.mark.parametrize("flags", [("--layers", "0,3"), ("--student", "demo-hybrid")])
def test_a_student_that_keeps_states_is_refused(
    texts: Path, tmp_path: Path, flags: Sequence[str]
) -> None:
    """Of a hybrid the layers with attention alone can be taken."""
    result = train(texts, Path("demo-hybrid"), tmp_path / "student", *flags)
    assert isinstance(result.exception, ConfigError), result.output
    assert re.match(f"{flags[0][2:]}: keep states", str(result.exception))
    result = train(texts, Path("demo-hybrid"), tmp_path / "student", "--layers", "3", "--dry-run")
    assert result.exit_code == 0, (result.output, result.exception)
