"""Forms and bytes of tokenizers that llguidance cannot read by itself, or that exceed the head."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from draftline.core.arrays import UInt32
from draftline.core.errors import RequestError
from draftline.core.request.allowed_tokens import Kind, StructuredOutput, unpack
from draftline.core.tree.tree import NO_TREE
from draftline.models.text.grammar import GrammarConstraint, GrammarFactory, GrammarProcess
from draftline.models.text.grammar_messages import GrammarSetup
from draftline.models.text.tokenizer import TokenBytes
from support.tools.odd_tokenizers import ODD, with_gaps
from transformers import PreTrainedTokenizerFast

WAIT_S = 60
TEXTS = ["ab cat abc", '{"a": [1]}\n', "  x", "é世 z", "<image>catcat"]
SCHEMA = {"type": "object", "properties": {"cat": {"enum": [1, "ab c", None]}},
          "required": ["cat"], "additionalProperties": False}  # fmt: skip
FORMS: list[tuple[Kind, str, str]] = [
    ("json", json.dumps(SCHEMA), r'\{\s*"cat"\s*:\s*(1|"ab c"|null)\s*\}'),
    ("regex", "(ab|cat){2} ?[0-9]", r"(ab|cat){2} ?[0-9]"),
    ("choice", '["abc cat", "ca{", "é世"]', r"abc cat|ca\{|é世"),
    ("grammar", 'start: "{" call "}]"\ncall: "abc " | /c+/', r"\{(abc |c+)\}\]"),
]


@contextmanager
def factory_of(name: str) -> Iterator[tuple[PreTrainedTokenizerFast, int, GrammarFactory]]:
    make, head = ODD[name]
    tokenizer = make()
    factory = GrammarFactory(tokenizer, head, [tokenizer.eos_token_id])
    try:
        yield tokenizer, head, factory
    finally:
        factory.close()


def constraint_of(factory: GrammarFactory, kind: Kind, value: str) -> GrammarConstraint:
    return factory.constraint(StructuredOutput(kind=kind, value=value)).result(WAIT_S)


def text_behind(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> str:
    """The text of ids that do not begin it, as transformers decodes them."""
    (before,) = tokenizer.convert_tokens_to_ids(["z"])
    return tokenizer.decode([before, *ids]).removeprefix("z")


def allowed(mask: UInt32, head: int) -> set[int]:
    return set(np.flatnonzero(unpack(mask[None], head)[0]).tolist())


@pytest.mark.parametrize("name", ODD)
def test_bytes_of_tokens_add_up_to_the_text(name: str) -> None:
    tokenizer = ODD[name][0]()
    bytes_of = TokenBytes(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        joined = b"".join([bytes_of.at_start(ids[0]), *map(bytes_of, ids[1:])])
        assert joined.decode() == tokenizer.decode(ids)
    for token, index in tokenizer.get_vocab().items():
        if index != tokenizer.eos_token_id and not re.fullmatch("<0x[89A-F].>", token):
            assert bytes_of(index).decode(errors="replace") == text_behind(tokenizer, [index])


@pytest.mark.parametrize("name", ODD)
def test_masks_allow_the_tokens_whose_texts_fit(name: str) -> None:
    with factory_of(name) as (tokenizer, head, factory):
        constraint = constraint_of(factory, "regex", "[a-z ]{0,3}")
        texts = {
            index: text_behind(tokenizer, [index])
            for index in tokenizer.get_vocab().values()
            if index < head and index != tokenizer.eos_token_id
        }
        fits = {index for index, text in texts.items() if re.fullmatch("[a-z ]{1,3}", text)}
        assert allowed(constraint.first, head) == fits | {tokenizer.eos_token_id}


@pytest.mark.parametrize("name", ODD)
def test_each_form_is_followed_to_its_end(name: str) -> None:
    draw = random.Random(0)
    with factory_of(name) as (tokenizer, head, factory):
        for kind, value, expected in FORMS * 3:
            constraint = constraint_of(factory, kind, value)
            ids: list[int] = []
            mask = constraint.first
            while tokenizer.eos_token_id not in (choices := allowed(mask, head)):
                assert choices
                ids.append(draw.choice(sorted(choices)))
                constraint.advance(ids[-1:])
                mask = constraint.follow(NO_TREE).result(WAIT_S).masks[0]
            assert re.fullmatch(expected, text_behind(tokenizer, ids)), (kind, ids)


def test_a_forced_text_is_spelled_as_the_model_writes_it() -> None:
    """Where one text alone may follow, its tokens are those of the tokenizer itself."""
    for name in ("byte fallback", "metaspace", "larger than the head"):
        with factory_of(name) as (tokenizer, head, factory):
            constraint = constraint_of(factory, "choice", '["xabc", "yabc"]')
            constraint.advance(tokenizer.convert_tokens_to_ids(["x"]))
            mask = constraint.follow(NO_TREE).result(WAIT_S).masks[0]
            assert allowed(mask, head) == set(tokenizer.convert_tokens_to_ids(["abc"]))
            # What is spelled by a token beyond the head is spelled by others.
            constraint = constraint_of(factory, "choice", '["xcatcat", "ycatcat"]')
            constraint.advance(tokenizer.convert_tokens_to_ids(["x"]))
            mask = constraint.follow(NO_TREE).result(WAIT_S).masks[0]
            assert allowed(mask, head) == set(tokenizer.convert_tokens_to_ids(["cat"]))


def test_the_names_of_special_tokens_are_text_in_a_form() -> None:
    with factory_of("byte fallback") as (tokenizer, head, factory):
        constraint = constraint_of(factory, "choice", '["</s>"]')
        ids: list[int] = []
        mask = constraint.first
        while (choices := allowed(mask, head)) != {tokenizer.eos_token_id}:
            ids.append(min(choices))
            constraint.advance(ids[-1:])
            mask = constraint.follow(NO_TREE).result(WAIT_S).masks[0]
        assert text_behind(tokenizer, ids) == "</s>"
        assert tokenizer.eos_token_id not in ids


def test_an_end_beyond_the_head_is_none() -> None:
    tokenizer = with_gaps()
    factory = GrammarFactory(tokenizer, 100, [tokenizer.eos_token_id])
    with pytest.raises(RequestError, match="end-of-sequence"):
        factory.constraint(StructuredOutput(kind="json_object"))


def test_a_tokenizer_of_no_use_is_refused_without_further_processes() -> None:
    starts = []

    def setup() -> GrammarSetup:
        starts.append(1)
        # An end that the vocabulary does not have.
        return GrammarSetup(with_gaps().backend_tokenizer.to_str(), 320, (900,), 1 << 30)

    process = GrammarProcess(setup)
    try:
        for _ in range(3):
            form = process.new_form(StructuredOutput(kind="json_object", field="tools"))
            with pytest.raises(RequestError, match=r"tools: .*this model's tokenizer"):
                process.follow(form, NO_TREE).result(WAIT_S)
    finally:
        process.close()
    assert len(starts) == 1
