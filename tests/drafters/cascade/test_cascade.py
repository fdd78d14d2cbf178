"""Cascades: guesses change no draw, and drafters write one behind the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.drafting.factory import build_drafter
from draftline.core.errors import ConfigError
from draftline.core.logits_params import LogitsParams
from draftline.core.proposals import Commit, DraftRequest, Proposal, Query, empty_proposal
from draftline.drafters.cascade.drafter import CascadeDrafter
from draftline.drafters.cascade.helper import Helper
from draftline.drafters.model.drafter import ModelDrafter, load_model_drafter
from draftline.drafters.model.options import ModelOptions
from draftline.drafters.ngram.anpd import AnpdDrafter
from support.tools.tiny_models import save_tiny_model

SEED = 3
TEXT = np.array([1, 2, 3, 1, 2, 3, 1, 2], dtype=np.int32)


class Oracle:
    """Guesses what the model drew before, every `wrong_after`-th token but not."""

    name = "oracle"
    memory_bytes = 0

    def __init__(self, chain: list[int], wrong_after: int) -> None:
        self.chain = chain
        self.wrong_after = wrong_after
        self.asked: list[Query] = []

    def propose(self, queries: list[Query], deadline: float | None = None) -> list[Proposal]:
        self.asked += queries
        return [self._one(query) for query in queries]

    def _one(self, query: Query) -> Proposal:
        assert query.assumed is not None
        first = len(query.assumed)
        tokens = [
            token + ((place + 1) % self.wrong_after == 0)
            for place, token in enumerate(self.chain[first : first + query.max_nodes], first)
        ]
        count = len(tokens)
        parents = np.arange(-1, count - 1, dtype=np.int32)
        return Proposal("oracle", np.array(tokens, np.int32), parents, np.zeros(count, np.float32))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def request(temperature: float, params: LogitsParams | None = None) -> DraftRequest:
    given = {} if params is None else {"logits_params": params}
    return DraftRequest("r", TEXT, 4, temperature, SEED, **given)


def model(checkpoint: Path, **options: Any) -> ModelDrafter:
    chosen = ModelOptions(**{"num_tokens": 8, "num_blocks": 20, "block_size": 4, **options})
    return load_model_drafter(checkpoint, options=chosen)


def assert_same(one: Proposal, other: Proposal) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert one.parents.tolist() == other.parents.tolist()
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
    if one.distributions is not None and other.distributions is not None:
        assert one.distributions.ids.tolist() == other.distributions.ids.tolist()
        np.testing.assert_allclose(one.distributions.probs, other.distributions.probs, atol=1e-5)
    else:
        assert one.distributions is other.distributions is None


PENALISED = LogitsParams(repetition_penalty=1.4, frequency_penalty=0.6, logit_bias={5: 1.5})


@pytest.mark.parametrize(
    ("temperature", "params", "options"),
    [
        (0.0, None, {}),
        (0.9, None, {}),
        (0.9, PENALISED, {}),
        (0.9, None, {"distribution_size": 16}),
        (0.9, None, {"stop": "svip"}),
        (0.0, None, {"branch": 2}),
    ],
)
@pytest.mark.parametrize("wrong_after", [1, 3, 100])
def test_guesses_change_no_draw(
    checkpoint: Path,
    temperature: float,
    params: LogitsParams | None,
    options: dict[str, Any],
    wrong_after: int,
) -> None:
    plain, helped = model(checkpoint, **options), model(checkpoint, **options)
    text = TEXT.tolist()
    expected = empty_proposal("none")
    plain.open(request(temperature, params))
    helped.open(request(temperature, params))
    said = [[], [7]]
    for place in range(3):
        # In the end all of the last draft and one token more.
        committed = said[place] if place < 2 else [*expected.tokens[:8].tolist(), 9]
        if committed:
            commit = Commit("r", len(text), np.array(committed, dtype=np.int32))
            plain.observe([commit])
            helped.observe([commit])
            text += committed
        [expected] = plain.propose([Query("r", len(text), 10)])
        before = helped.num_passes
        oracle: Any = Oracle(expected.tokens.tolist(), wrong_after)
        helped.helper = Helper(oracle, 3)
        [found] = helped.propose([Query("r", len(text), 10)])
        assert_same(found, expected)
        num_drawn = len([parent for parent in expected.parents.tolist()[1:] if parent >= 0]) + 1
        if wrong_after == 1:
            assert helped.num_passes - before == num_drawn
        elif wrong_after == 100 and num_drawn == 8:
            # Three guesses and what follows them, twice.
            assert helped.num_passes - before == 2
        assert all(query.max_nodes <= 3 for query in oracle.asked)


def test_the_second_goes_on_behind_the_first(checkpoint: Path) -> None:
    first, second = model(checkpoint, distribution_size=8), AnpdDrafter()
    cascade = CascadeDrafter("c", [first, second], [2, 4])
    cascade.open(request(0.9))
    [found] = cascade.propose([Query("r", len(TEXT), 16)])
    alone = model(checkpoint, distribution_size=8)
    alone.open(request(0.9))
    [begun] = alone.propose([Query("r", len(TEXT), 2)])
    assert found.tokens[:2].tolist() == begun.tokens.tolist()
    [rest] = second.propose([Query("r", len(TEXT), 4, tuple(begun.tokens.tolist()))])
    assert found.tokens[2:].tolist() == rest.tokens.tolist()
    assert found.distributions is not None
    found.distributions.check(found.tokens, 10_000)
    # What copies is no draw.
    assert found.distributions.probs.any(axis=1).tolist() == [True] * 2 + [False] * len(rest.tokens)


def test_the_first_alone_is_asked_where_no_more_fits(checkpoint: Path) -> None:
    cascade = CascadeDrafter("c", [model(checkpoint), AnpdDrafter()], [2, 4])
    cascade.open(request(0.0))
    for max_nodes in (0, 1, 2):
        [found] = cascade.propose([Query("r", len(TEXT), max_nodes)])
        assert len(found.tokens) == max_nodes


def test_counted_text_is_not_that_which_is_assumed() -> None:
    drafter = AnpdDrafter()
    drafter.open(request(0.0))
    before = drafter.propose([Query("r", len(TEXT), 3)])[0].tokens.tolist()
    assert before == [3, 1, 2]
    assert drafter.propose([Query("r", len(TEXT), 3, (3,))])[0].tokens.tolist() == [1, 2, 3]
    # Behind a token that the text does not have nothing is known; behind one more it is again.
    assert drafter.propose([Query("r", len(TEXT), 3, (8,))])[0].tokens.tolist() == []
    assert drafter.propose([Query("r", len(TEXT), 3, (8, 2))])[0].tokens.tolist() == [3, 1, 2]
    assert drafter.propose([Query("r", len(TEXT), 3)])[0].tokens.tolist() == before


MODEL = {"kind": "model", "model": "demo-drafter"}
COPIES = {"kind": "anpd"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "drafters: must be a list of drafters"),
        ({"drafters": [MODEL], "horizontal": [4]}, "drafters: must be 2 to 4"),
        ({"drafters": [MODEL, {"kind": "spectra"}]}, r"drafters\[1\].kind: of a cascade must be"),
        ({"drafters": [MODEL, COPIES]}, "horizontal: must be a number of tokens for each of 2"),
        ({"drafters": [MODEL, COPIES], "horizontal": [4, 0]}, "drafter 1 would be asked for"),
        ({"drafters": [MODEL, COPIES], "horizontal": [0, 4]}, "horizontal: must begin"),
        ({"drafters": [MODEL, COPIES], "horizontal": 4}, "horizontal: must be a list"),
        (
            {"drafters": [MODEL, COPIES], "horizontal": [4, 4], "vertical": [2, 2]},
            "vertical: must be at most 1",
        ),
        (
            {"drafters": [COPIES, COPIES], "horizontal": [4, 4], "vertical": [2]},
            r"vertical: drafters\[0\] is no model",
        ),
        (
            {"drafters": [MODEL | {"tree": "dynamic"}, COPIES], "horizontal": [4, 4]},
            r"drafters\[0\].tree: must be 'chain'",
        ),
        (
            {"drafters": [MODEL, MODEL | {"stop": "svip"}], "horizontal": [4, 4]},
            r"drafters\[1\].stop: must be 'constant'",
        ),
        (
            {"drafters": [MODEL | {"max_nodes": 4}, COPIES], "horizontal": [4, 4]},
            r"drafters\[0\].max_nodes: is of the cascade as a whole",
        ),
        (
            {"drafters": [MODEL | {"topk": 4}, COPIES], "horizontal": [4, 4]},
            r"drafters\[0\].topk: unknown key",
        ),
        (
            {
                "drafters": [MODEL, MODEL | {"model": "demo-drafter-other-vocab"}],
                "horizontal": [4, 4],
            },
            r"drafters\[1\].vocabulary: must be the served model's",
        ),
    ],
)
def test_settings_that_cannot_be_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_drafter(DrafterConfig(kind="cascade", **settings), EngineConfig(model="demo"))


def test_under_other_rules_its_models_declare() -> None:
    cascade = DrafterConfig(kind="cascade", drafters=[MODEL, COPIES], horizontal=[4, 4])
    config = EngineConfig(model="demo", acceptance="rejection", drafters=(cascade,))
    drafter = build_drafter(config.told_drafters[0], config)
    drafter.open(request(0.9))
    [found] = drafter.propose([Query("r", len(TEXT), 8)])
    assert found.distributions is not None
    assert found.distributions.ids.shape == (len(found.tokens), 64)
    assert found.distributions.probs[:4].any(axis=1).all()
