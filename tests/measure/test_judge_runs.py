"""Answers that differ are judged by the model itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from draftline.measure.records import Record
from draftline.measure.runs.near_tie import explain_by_model
from draftline.models.load.bundled import demo_path
from draftline.models.text.tokenizer import load_tokenizer
from support.fakes.fake_endpoint import record
from transformers import AutoModelForCausalLM

TEXT = "def read_json(path):\n    "


@pytest.fixture(scope="module")
def ranked() -> list[int]:
    """All tokens after the prompt, the likeliest first."""
    model = AutoModelForCausalLM.from_pretrained(demo_path(), dtype=torch.float32).eval()
    ids = load_tokenizer("demo")(TEXT)["input_ids"]
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0, -1].argsort(descending=True).tolist()


def test_a_wrong_token_is_no_near_tie(ranked: list[int]) -> None:
    def said(*tokens: int) -> Record:
        return replace(record(tokens), prompt_input=TEXT)

    explain = explain_by_model("demo", 0.0, load_tokenizer("demo"))
    why, is_fault = explain(said(ranked[0], 5), said(ranked[1], 5))
    assert is_fault
    assert "NO NEAR-TIE: gap" in why
    assert float(why.split("gap ")[1]) > 0
    shorter = explain(said(ranked[0], 5), said(ranked[0]))
    assert shorter == ("one answer ends before the other", True)
