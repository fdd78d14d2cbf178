"""A head is trained on a quantised target's own values."""

from __future__ import annotations

from pathlib import Path

import torch
from draftline.training.heads.distilled_texts import DistilledText
from draftline.training.heads.target import Target
from support.inputs.quantized_checkpoints import FORMATS, save_pair


def test_features_are_those_of_the_values(tmp_path: Path) -> None:
    pair = save_pair("llama", FORMATS["gptq 4, act order"], tmp_path)
    texts = [DistilledText(tuple(range(2, 20)), ((10, 18),))]
    found, expected, source = (
        Target(folder, torch.device("cpu"), layers=[0, 2]).batch(texts, 32).features
        for folder in (pair.quantized, pair.plain, tmp_path / "source")
    )
    assert torch.equal(found, expected)
    assert not torch.equal(found, source)
