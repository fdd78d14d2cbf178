"""Misaligned drafts are counted as a drafter makes them, pass by pass."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from draftline.benchmarks.heads.misalignment import PassCount, count_misaligned, main
from draftline.core.errors import ConfigError
from draftline.models.heads.feature_head import FeatureHead
from draftline.models.heads.formats.feature_head_config import FeatureHeadConfig
from draftline.training.heads.target import Target, TextBatch
from support.inputs.head_drafts import drafted_behind
from torch import nn

TEXTS, LENGTH, HIDDEN, VOCAB, PASSES = 4, 14, 16, 4, 4


def test_counts_are_those_of_drafts_made_one_by_one() -> None:
    torch.manual_seed(9)
    config = FeatureHeadConfig("guided", HIDDEN, 24, 2, 1, 8, VOCAB, fusion_size=20,
                               splits_output=True, has_fusion_bias=True,
                               feature_size=HIDDEN)  # fmt: skip
    head = FeatureHead(config).requires_grad_(False)
    embed, lm_head = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
    embed.requires_grad_(False)
    lm_head.requires_grad_(False)
    features = torch.randn(TEXTS, LENGTH, HIDDEN)
    answers = torch.ones(TEXTS, LENGTH, dtype=torch.bool)
    answers[:, :3] = False
    answers[1, 7:] = False
    tokens = torch.randint(0, VOCAB, (TEXTS, LENGTH))
    batch = TextBatch(tokens, features, answers, features)
    counts = [PassCount() for _ in range(PASSES)]
    target = cast("Target", SimpleNamespace(embed=embed, lm_head=lm_head))
    count_misaligned(head, target, batch, counts)
    expected = [PassCount() for _ in range(PASSES)]
    for text in range(TEXTS):
        for row in range(LENGTH - 2):
            count = min(PASSES, LENGTH - 2 - row)
            drafts = drafted_behind(head, embed, batch, text=text, row=row, count=count)
            for index, draft in enumerate(drafts):
                place = row + index
                if answers[text, place + 2]:
                    best = lm_head(draft).argmax()
                    expected[index].drafts += 1
                    wanted = lm_head(features[text, place + 1]).argmax()
                    expected[index].from_target += int(best != wanted)
                    expected[index].from_text += int(best != tokens[text, place + 2])
    assert counts == expected
    assert expected[0].from_target != expected[1].from_target


def test_the_bundled_head_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    output = tmp_path / "found.json"
    settings: dict[str, Any] = {"num_passes": 2, "num_prompts": 2, "max_tokens": 12}
    main(heads="own=demo-griffin", output=output, **settings)
    shown = capsys.readouterr().out
    assert "own" in shown
    first, second = json.loads(output.read_text())["heads"]["own"]
    # Answers may end early; each has its first tokens.
    assert 4 <= second["drafts"] <= first["drafts"] <= 24
    assert 0 <= first["from_target"] < first["drafts"], "it is right at times"
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="no feature head"):
        main(heads="own=demo-specformer", output=output, **settings)
