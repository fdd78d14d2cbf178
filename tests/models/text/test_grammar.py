"""Structured answers: what a grammar allows on the branches of a tree, and bad grammars."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest
from draftline.core.arrays import ROOT, Bool, UInt32
from draftline.core.errors import EngineClosed, RequestError
from draftline.core.request.allowed_tokens import (
    AllowedTokens,
    GrammarMasks,
    StructuredOutput,
    full_mask,
    unpack,
)
from draftline.core.tree.tree import NO_TREE, TokenTree
from draftline.models.load.bundled import demo_path
from draftline.models.text import grammar
from draftline.models.text.grammar import GrammarConstraint, GrammarFactory
from draftline.models.text.grammar_worker import Matcher
from draftline.models.text.tokenizer import load_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLTokenizer
from support.inputs.trees import tree_of
from support.servers.processes import send_signal
from transformers import PreTrainedTokenizerBase

VOCAB_SIZE = 4096
WAIT_S = 60


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(demo_path("demo"))


@pytest.fixture(scope="module")
def factory(tokenizer: PreTrainedTokenizerBase) -> Iterator[GrammarFactory]:
    found = GrammarFactory(tokenizer, VOCAB_SIZE, [tokenizer.eos_token_id])
    yield found
    found.close()


def constraint_of(factory: GrammarFactory, kind: str, value: str = "") -> GrammarConstraint:
    output = StructuredOutput(kind=kind, value=value)  # type: ignore[arg-type]
    return factory.constraint(output).result(WAIT_S)


def form_of(constraint: GrammarConstraint, tree: TokenTree) -> GrammarMasks:
    return constraint.follow(tree).result(WAIT_S)


def allowed(constraint: GrammarConstraint, tree: TokenTree, always: UInt32 | None = None) -> Bool:
    rules = AllowedTokens(always, None, 0, constraint)
    return rules.allowed(tree, 0, grammar=form_of(constraint, tree))


def one(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    (token,) = tokenizer.encode(text, add_special_tokens=False)
    return token


def allowed_after(
    constraint: GrammarConstraint, tree: TokenTree, tokenizer: PreTrainedTokenizerBase
) -> list[set[str]]:
    rows = unpack(form_of(constraint, tree).masks, VOCAB_SIZE)
    return [{tokenizer.decode([token]) for token in np.flatnonzero(row)} for row in rows]


def test_every_branch_has_its_own_state(
    factory: GrammarFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    constraint = constraint_of(factory, "regex", "a(b|c)d?")
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
    assert allowed(constraint, tree).tolist() == [True, True, True, True, False]
    constraint.advance([a, c])
    assert allowed_after(constraint, NO_TREE, tokenizer) == [{"d", eos}]


def test_a_schema_ends_with_the_end_of_the_answer(
    factory: GrammarFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    schema = json.dumps({"type": "object", "properties": {}, "additionalProperties": False})
    constraint = constraint_of(factory, "json", schema)
    constraint.advance(tokenizer.encode("{}", add_special_tokens=False))
    assert allowed_after(constraint, NO_TREE, tokenizer) == [{tokenizer.eos_token}]


def test_nothing_follows_the_end(
    factory: GrammarFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    constraint = constraint_of(factory, "choice", '["a"]')
    tree = tree_of([one(tokenizer, "a"), tokenizer.eos_token_id, 5], [ROOT, 0, 1])
    # The end itself is worth no row, either: it comes as the bonus token.
    assert allowed(constraint, tree).tolist() == [True, False, False]


@given(data=st.data())
def test_what_is_accepted_is_what_the_masks_allow(
    factory: GrammarFactory, tokenizer: PreTrainedTokenizerBase, data: st.DataObject
) -> None:
    constraint = constraint_of(factory, "regex", "a(b|c)*d?")
    eos = tokenizer.eos_token_id
    names = [one(tokenizer, text) for text in "abcd"]
    tokens = data.draw(st.lists(st.sampled_from([*names, eos]), min_size=1, max_size=12))
    parents = [data.draw(st.integers(ROOT, node - 1)) for node in range(len(tokens))]
    tree = tree_of(tokens, parents)
    # With a second rule there is no way round the masks.
    exact = allowed(constraint, tree, full_mask(VOCAB_SIZE))
    accepted = allowed(constraint, tree)
    assert accepted.tolist() == (exact & (tree.tokens != eos)).tolist()
    assert form_of(constraint, tree).masks[1:][accepted].any(axis=1).all()


def test_a_forced_text_is_accepted_in_any_spelling(
    factory: GrammarFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    constraint = constraint_of(factory, "choice", '["xname", "yname"]')
    constraint.advance([one(tokenizer, "x")])
    short, whole = one(tokenizer, "n"), one(tokenizer, "name")
    tree = tree_of([short, whole], [ROOT, ROOT])
    assert form_of(constraint, tree).accepted.tolist() == [True, True]
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
        constraint_of(factory, kind, value)
    assert hint in str(caught.value)


def test_a_model_without_an_end_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    factory = GrammarFactory(tokenizer, VOCAB_SIZE, [])
    with pytest.raises(RequestError, match="end-of-sequence"):
        factory.constraint(StructuredOutput(kind="json_object"))


AMBIGUOUS = 's: "a" | s s | s s s | s s s s | s s s s s'


def test_a_form_beyond_its_limits_ends_alone(
    factory: GrammarFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    """The row of an ambiguous grammar outgrows its limit after some dozen tokens."""
    constraint = constraint_of(factory, "grammar", f"start: s\n{AMBIGUOUS}")
    other = constraint_of(factory, "choice", '["a"]')
    a = one(tokenizer, "a")

    def go_on() -> None:
        for _ in range(400):
            constraint.advance([a])
            form_of(constraint, NO_TREE)

    with pytest.raises(RequestError, match=r"structured_outputs: grammar: .*items"):
        go_on()
    assert allowed_after(other, NO_TREE, tokenizer) == [{"a"}]


def test_a_tree_that_takes_too_long_is_cut_but_for_its_root(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    now = iter(range(1000))
    eos = [tokenizer.eos_token_id]
    backend = LLTokenizer(tokenizer.backend_tokenizer.to_str(), n_vocab=VOCAB_SIZE, eos_token=eos)
    matcher = Matcher(backend, ("regex", "a*"), VOCAB_SIZE, eos, clock=lambda: next(now) * 0.02)
    a = one(tokenizer, "a")
    rows, masks = matcher.follow([a] * 6, [ROOT, 0, 1, 2, 3, 4])
    assert rows == [0, 1, 2]
    # The matcher stands at the root again.
    assert np.array_equal(matcher.follow([], [])[1][0], masks[0])


def worker_pid(factory: GrammarFactory) -> int:
    process = factory.process._process
    assert process is not None
    return process.pid


def test_a_process_that_dies_is_replaced_and_forms_go_on(
    factory: GrammarFactory, tokenizer: PreTrainedTokenizerBase
) -> None:
    constraint = constraint_of(factory, "regex", "a(b|c)d?")
    a, b = one(tokenizer, "a"), one(tokenizer, "b")
    constraint.advance([a])
    assert allowed_after(constraint, NO_TREE, tokenizer) == [{"b", "c"}]
    pid = worker_pid(factory)
    os.kill(pid, signal.SIGKILL)
    constraint.advance([b])
    assert allowed_after(constraint, NO_TREE, tokenizer) == [{"d", tokenizer.eos_token}]
    assert worker_pid(factory) != pid


def test_a_process_that_is_stuck_is_replaced_and_only_what_it_was_at_ends(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    factory = GrammarFactory(tokenizer, VOCAB_SIZE, [tokenizer.eos_token_id])
    factory.process._timeout_s = 2.0
    try:
        stuck = constraint_of(factory, "choice", '["a"]')
        other = constraint_of(factory, "choice", '["b"]')
        send_signal(worker_pid(factory), signal.SIGSTOP)
        answer = stuck.follow(NO_TREE)
        with pytest.raises(RequestError, match="takes longer than 2 s"):
            answer.result(WAIT_S)
        assert allowed_after(other, NO_TREE, tokenizer) == [{"b"}]
    finally:
        factory.close()
    with pytest.raises(EngineClosed):
        other.follow(NO_TREE).result(WAIT_S)


def test_a_form_that_ends_its_process_again_ends_alone(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that a form takes is bounded by that of its process, which dies of it."""
    monkeypatch.setattr(grammar, "MEMORY_BYTES", 600 << 20)
    factory = GrammarFactory(tokenizer, VOCAB_SIZE, [tokenizer.eos_token_id])
    try:
        other = constraint_of(factory, "choice", '["b"]')
        texts = json.dumps([f"number {index} {index * 7919}" for index in range(200_000)])
        with pytest.raises(RequestError, match="structured_outputs"):
            constraint_of(factory, "choice", texts)
        assert allowed_after(other, NO_TREE, tokenizer) == [{"b"}]
    finally:
        factory.close()


def test_a_constraint_that_is_given_up_leaves_nothing(factory: GrammarFactory) -> None:
    preparing = factory.constraint(StructuredOutput(kind="choice", value='["a"]'))
    preparing.cancel()
    assert preparing.cancelled()
    # Calls are answered in order: the one that was given up is done.
    constraint_of(factory, "choice", '["b"]')
    assert not factory.process._calls
