"""`draftline train model`: what the student begins as."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import PretrainedConfig

from ....core.errors import ConfigError
from ....models.load.checkpoint import read_config, resolve_model_path
from ....models.load.chosen_layers import config_of_layers
from ....models.load.model_info import read_model_info
from ....models.load.supported import keeps_states
from ....models.text.fingerprint import tokenizer_hash
from ....training.heads.distilled_texts import DistilledText
from ....training.heads.student import StudentConfig
from .job import HeadJob


def student_config(target: Path, job: HeadJob, texts: Sequence[DistilledText]) -> StudentConfig:
    """The student of `--student`, or of `--layers` of the target.

    Embeddings often have more rows than there are tokens, and not always as many as those of
    another size of the same model. The student has no more rows than the target.

    Raises `ConfigError`, `CheckpointError`.
    """
    if (job.student is None) is (job.layers is None):
        raise ConfigError("student", "give either --student, or --layers of the target to make one")
    # A student of layers needs it at the end: a target without one is refused now.
    tokens = tokenizer_hash(target)
    rows = read_model_info(target).vocab_size
    if job.layers is not None:
        layers = _chosen_layers(job.layers, read_model_info(target).num_layers)
        _check_states("layers", config_of_layers(read_config(target), layers))
        return StudentConfig(folder=str(target.resolve()), layers=layers, vocab_size=rows)
    assert job.student is not None
    folder = resolve_model_path(job.student).resolve()
    if tokenizer_hash(folder) != tokens:
        raise ConfigError(
            "student",
            f"{job.student} has another tokenizer than {job.model}; give a model with the same one",
        )
    _check_states("student", read_config(folder))
    rows = min(rows, read_model_info(folder).vocab_size)
    last = max(max(text.tokens) for text in texts)
    if last >= rows:
        raise ConfigError(
            "student", f"{job.student} has embeddings of {rows} tokens, and the texts token {last}"
        )
    return StudentConfig(folder=str(folder), vocab_size=rows)


def _check_states(setting: str, config: PretrainedConfig) -> None:
    if keeps_states(config):
        raise ConfigError(
            setting, "keep states of texts, and a model with such layers cannot draft"
        )


def _chosen_layers(text: str, num_layers: int) -> tuple[int, ...]:
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if (
        list(layers) != sorted(set(layers))
        or not layers
        or not 0 <= layers[0] <= layers[-1] < num_layers
    ):
        raise ConfigError(
            "layers",
            f"are ascending numbers from 0 to {num_layers - 1}, separated by commas; not {text!r}",
        )
    return layers
