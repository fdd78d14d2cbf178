"""Structured answers: what a grammar allows on the branches of a tree, and bad grammars."""

from __future__ import annotations

import json

import numpy as np
import pytest
from draftline.core.errors import RequestError
from draftline.core.structured_output import StructuredOutput
from draftline.core.token_mask import full_mask, unpack
from draftline.core.token_rules import TokenRules
from draftline.core.tree import NO_TREE, TokenTree
from draftline.core.types import ROOT
from draftline.models.bundled import demo_path
from draftline.models.grammar import GrammarConstraint, GrammarFactory
from draftline.models.tokenizer import load_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from support.trees import tree_of
from transformers import PreTrainedTokenizerBase

VOCAB_SIZE = 4096


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(demo_path("demo"))


@pytest.fixture(scope="module")
def factory(tokenizer: PreTrainedTokenizerBase) -> GrammarFactory:
    return GrammarFactory(tokenizer, VOCAB_SIZE, [tokenizer.eos_token_id])


def one(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    (token,) = tokenizer.encode(text, add_special_tokens=False)
    return token


def allowed_after(
    constraint: GrammarConstraint, tree: TokenTree, tokenizer: PreTrainedTokenizerBase
) -> list[set[str]]:
    rows = unpack(constraint.masks(tree), VOCAB_SIZE)
    return [{tokenizer.decode([token]) for token in np.flatnonzero(row)} for row in rows]


def test_every_branch_has_its_own_state(
    factory: GrammarFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    constraint = factory.constraint(StructuredOutput(kind="regex", value="a(b|c)d?"))
    a, b, c, d = (one(tokenizer, text) for text in "abcd")
    tree = tree_of([a, b, d, c, b], [ROOT, 0, 1, 0, ROOT])
    eos = tokenizer.eos_token
    for _ in range(2):
        root, after_a, after_ab, after_abd, after_ac, _ = allowed_after(constraint, tree, tokenizer)
        assert "a" in root
        assert "b" not in root
        assert {"b", "c"} <= after_a
        assert after_ab == after_ac == {"d", eos}
        assert after_abd == {eos}
    rules = TokenRules(None, None, 0, constraint)
    assert rules.allowed(tree, 0).tolist() == [True, True, True, True, False]
    constraint.advance([a, c])
    assert allowed_after(constraint, NO_TREE, tokenizer) == [{"d", eos}]


def test_a_schema_ends_with_the_end_of_the_answer(
    factory: GrammarFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    schema = json.dumps({"type": "object", "properties": {}, "additionalProperties": False})
    constraint = factory.constraint(StructuredOutput(kind="json", value=schema))
    constraint.advance(tokenizer.encode("{}", add_special_tokens=False))
    assert allowed_after(constraint, NO_TREE, tokenizer) == [{tokenizer.eos_token}]


def test_nothing_follows_the_end(
    factory: GrammarFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    constraint = factory.constraint(StructuredOutput(kind="choice", value='["a"]'))
    tree = tree_of([one(tokenizer, "a"), tokenizer.eos_token_id, 5], [ROOT, 0, 1])
    rules = TokenRules(None, None, 0, constraint)
    # The end itself is worth no row, either: it comes as the bonus token.
    assert rules.allowed(tree, 0).tolist() == [True, False, False]


@given(data=st.data())
def test_what_is_accepted_is_what_the_masks_allow(
    factory: GrammarFactory, tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    constraint = factory.constraint(StructuredOutput(kind="regex", value="a(b|c)*d?"))
    eos = tokenizer.eos_token_id
    names = [one(tokenizer, text) for text in "abcd"]
    tokens = data.draw(st.lists(st.sampled_from([*names, eos]), min_size=1, max_size=12))
    parents = [data.draw(st.integers(ROOT, node - 1)) for node in range(len(tokens))]
    tree = tree_of(tokens, parents)
    # With a second rule there is no way round the masks.
    exact = TokenRules(full_mask(VOCAB_SIZE), None, 0, constraint).allowed(tree, 0)
    accepted = TokenRules(None, None, 0, constraint).allowed(tree, 0)
    assert accepted.tolist() == (exact & (tree.tokens != eos)).tolist()
    assert constraint.masks(tree)[1:][accepted].any(axis=1).all()


def test_a_forced_text_is_accepted_in_any_spelling(
    factory: GrammarFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    constraint = factory.constraint(StructuredOutput(kind="choice", value='["xname", "yname"]'))
    constraint.advance([one(tokenizer, "x")])
    short, whole = one(tokenizer, "n"), one(tokenizer, "name")
    tree = tree_of([short, whole], [ROOT, ROOT])
    assert constraint.accepts(tree).tolist() == [True, True]
    assert allowed_after(constraint, NO_TREE, tokenizer) == [{"name"}]


@pytest.mark.parametrize(
    ("kind", "value", "hint"),
    [
        ("json", "{", "not valid JSON"),
        ("json", "[]", "must be an object"),
        ("json", '{"type": "strange"}', "strange"),
        ("regex", "(a", "unclosed"),
        ("choice", "[]", "list of texts"),
        ("choice", "[1]", "list of texts"),
        ("grammar", "start: foo", "foo"),
    ],
)
def test_a_bad_form_is_refused(factory: GrammarFactory, kind: str, value: str, hint: str) -> None:
    with pytest.raises(RequestError, match="structured_outputs") as caught:
        factory.constraint(StructuredOutput(kind=kind, value=value))  # type: ignore[arg-type]
    assert hint in str(caught.value)


def test_a_model_without_an_end_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    factory = GrammarFactory(tokenizer, VOCAB_SIZE, [])
    with pytest.raises(RequestError, match="end-of-sequence"):
        factory.constraint(StructuredOutput(kind="json_object"))
