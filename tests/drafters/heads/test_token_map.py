"""Heads that draft a part of the vocabulary alone."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from draftline.core.errors import ConfigError
from draftline.drafters.heads.networks.token_map import (
    draft_tokens,
    read_token_map,
    with_tokens,
)
from draftline.models.heads.load_head import HeadConfig
from draftline.models.heads.parallel_heads import BlockwiseConfig, MedusaConfig
from draftline.models.heads.shared_parts import load_shared_parts
from draftline.models.load.bundled import demo_path
from draftline.models.load.model_info import read_model_info
from draftline.models.stage.output_vocabulary import pruned_head
from support.inputs.tiny_heads import dflash, eagle3, griffin

TOKENS = [7, 2, 40]


@pytest.mark.parametrize("form", ["ids.json", "list.pt", "tensor.pt"])
def test_every_form_of_the_file_is_read(tmp_path: Path, form: str) -> None:
    path = tmp_path / form
    if form == "ids.json":
        path.write_text(json.dumps(TOKENS))
    else:
        torch.save(TOKENS if form == "list.pt" else torch.tensor(TOKENS), path)
    assert read_token_map(str(path), 50).tolist() == sorted(TOKENS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2", "cannot read"),
        ("[]", "must hold a list of token ids"),
        ("[[1, 2]]", "must hold a list of token ids"),
        ("[1, [2]]", "cannot read"),
        ("[1.5]", "must hold a list of token ids"),
        ('{"a": 1}', "must hold a list of token ids"),
        ("[3, 4, 3]", "names 1 tokens twice"),
        ("[3, 50]", "are below 50: it is of another tokenizer"),
        ("[-1, 3]", "are below 50: it is of another tokenizer"),
    ],
)
def test_a_file_that_is_none_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ids.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as raised:
        read_token_map(str(path), 50)
    assert raised.value.field == "token_map"


def test_a_garbled_file_of_torch_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ids.pt"
    path.write_bytes(b"no tensor")
    with pytest.raises(ConfigError, match="token_map: cannot read"):
        read_token_map(str(path), 50)
    with pytest.raises(ConfigError, match="token_map: cannot read"):
        read_token_map(str(tmp_path / "missing.json"), 50)


def test_the_bundled_one_fits_the_demo_target() -> None:
    tokens = read_token_map("demo", read_model_info(demo_path()).vocab_size)
    assert len(tokens) == 1046


def test_heads_that_have_an_output_head_of_their_own_are_refused() -> None:
    target = demo_path()
    vocab_size = read_model_info(target).vocab_size
    by_target: list[HeadConfig] = [
        griffin(target), BlockwiseConfig(8, 2), MedusaConfig(8, 2, output="target")
    ]  # fmt: skip
    for config in by_target:
        assert draft_tokens("", config, vocab_size) is None
        assert draft_tokens("demo", config, vocab_size) is not None
    for config in (dflash(target), eagle3(target), MedusaConfig(8, 2)):
        assert draft_tokens("", config, vocab_size) is None
        with pytest.raises(ConfigError, match="token_map: is of heads that draft with the served"):
            draft_tokens("demo", config, vocab_size)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_logits_are_those_of_the_whole_head_and_of_no_other_token(softcap: float | None) -> None:
    target = read_model_info(demo_path())
    shared = replace(load_shared_parts(target, "float32", "cpu"), softcap=softcap)
    tokens = np.array([3, 17, 4000])
    prune = partial(pruned_head, shared.head)
    few = with_tokens(shared, tokens, target.vocab_size, prune, torch.device("cpu"))
    states = torch.randn(5, target.hidden_size)
    whole, logits = shared.logits(states), few.logits(states)
    torch.testing.assert_close(logits[:, tokens], whole[:, tokens])
    others = np.delete(np.arange(target.vocab_size), tokens)
    assert torch.isneginf(logits[:, others]).all()
