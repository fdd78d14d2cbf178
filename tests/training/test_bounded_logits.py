"""A target in training has the logits that it has when it serves."""

from __future__ import annotations

from pathlib import Path

import torch
from draftline.training.heads.target import Target
from support.tools.tiny_models import save_tiny_model
from transformers import AutoModelForCausalLM


def test_bounded_logits_are_those_of_the_model(tmp_path: Path) -> None:
    folder = save_tiny_model("gemma2", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.final_logit_softcapping
    ids = torch.arange(8)[None]
    target = Target(folder, torch.device("cpu"))
    with torch.no_grad():
        states = model.base_model(ids).last_hidden_state
        assert torch.equal(target.lm_head(states), model(ids).logits)
        assert not torch.equal(target.project(states), model(ids).logits)
    assert target.lm_head.get_parameter("weight") is target.project.get_parameter("weight")
