"""Arguments of forced calls: valid by the function's own schema, whatever its root is made of."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from draftline.core.errors import RequestError
from draftline.deploy.api.schema.chat import FunctionDefinition
from draftline.deploy.api.tools.call_syntax import PLAIN_JSON, argument_schema, call_grammar
from draftline.deploy.api.tools.chat_plan import with_start
from draftline.models.load.bundled import demo_path
from draftline.models.text.grammar_worker import Matcher
from draftline.models.text.tokenizer import load_tokenizer
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer
from pydantic import BaseModel, Field, RootModel, TypeAdapter
from transformers import PreTrainedTokenizerFast

INT = {"type": "integer", "minimum": 0, "maximum": 99}
# `x` may be missing in X, and must be there in XR.
X = {"type": "object", "properties": {"x": INT}}
XR, YR = ({"type": "object", "properties": {k: INT}, "required": [k]} for k in "xy")
KX, KY = (
    {"type": "object", "properties": {"k": {"const": k}, k: INT}, "required": ["k"]} for k in "xy"
)


class Node(BaseModel):
    v: Literal[1, 2]
    n: Node | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Literal[7, 9]


class Dog(BaseModel):
    kind: Literal["dog"]
    friend: Pet | None = None


class Pet(RootModel[Annotated[Cat | Dog, Field(discriminator="kind")]]):
    pass


Dog.model_rebuild()
EMPTY, JUST_X, JUST_Y, BOTH = "{}", '{"x": 1}', '{"y": 1}', '{"x": 1, "y": 1}'

# Of each root: the schema, arguments that may come, and arguments that may not.
ROOTS: dict[str, tuple[Any, list[str], list[str]]] = {
    "none": (None, [EMPTY], [JUST_X]),
    "plain": (X, [EMPTY, JUST_X], [JUST_Y, BOTH]),
    "no type": ({"properties": {"x": INT}}, [EMPTY, JUST_X], [JUST_Y, "1", "null"]),
    "object or null": ({**X, "type": ["object", "null"]}, [EMPTY, JUST_X], ["null"]),
    "required alone": ({"type": "object", "required": ["x"]}, [JUST_X], [EMPTY, JUST_Y, BOTH]),
    "open": ({**X, "additionalProperties": True}, [EMPTY, JUST_X, JUST_Y, BOTH], ['{"x": "a"}']),
    "open for some": ({**X, "additionalProperties": INT}, [JUST_Y, BOTH], ['{"y": "a"}']),
    "open for all": ({**X, "additionalProperties": {}}, [JUST_Y, '{"y": "a"}'], ['{"x": "a"}']),
    "$ref": ({"$defs": {"O": X}, "$ref": "#/$defs/O"}, [EMPTY, JUST_X], [JUST_Y, BOTH]),
    "$ref, required": ({"$defs": {"O": XR}, "$ref": "#/$defs/O"}, [JUST_X], [EMPTY, JUST_Y, BOTH]),
    "$ref twice": (
        {"$ref": "#/definitions/P",
         "definitions": {"P": {"$ref": "#/definitions/a~1b"}, "a/b": XR}},
        [JUST_X], [EMPTY, JUST_Y, BOTH],
    ),
    "$ref in a list": ({"anyOf": [XR, {"$ref": "#/anyOf/0"}]}, [JUST_X], [EMPTY, BOTH]),
    "$ref and more": (
        {"$defs": {"O": XR}, "$ref": "#/$defs/O", "properties": {"y": INT}},
        [JUST_X, BOTH], [EMPTY, JUST_Y, '{"x": 1, "z": 1}'],
    ),
    "$ref to an open one": (
        {"$defs": {"O": {**XR, "additionalProperties": INT}}, "$ref": "#/$defs/O"},
        [JUST_X, BOTH], [JUST_Y],
    ),
    "anyOf": ({"anyOf": [XR, YR]}, [JUST_X, JUST_Y], [EMPTY, BOTH, '{"z": 1}']),
    "anyOf or null": ({"anyOf": [XR, {"type": "null"}]}, [JUST_X], [EMPTY, "null"]),
    "anyOf of $ref": (
        {"$defs": {"O": XR, "P": YR}, "anyOf": [{"$ref": "#/$defs/O"}, {"$ref": "#/$defs/P"}]},
        [JUST_X, JUST_Y], [EMPTY, BOTH],
    ),
    "anyOf of what is required": (
        {"type": "object", "properties": {"x": INT, "y": INT},
         "anyOf": [{"required": ["x"]}, {"required": ["y"]}]},
        [JUST_X, JUST_Y, BOTH], [EMPTY, '{"x": 1, "z": 1}'],
    ),
    "anyOf with true": ({"anyOf": [XR, True]}, [EMPTY, JUST_X], ["1"]),
    "oneOf in anyOf in $ref": (
        {"$defs": {"O": {"anyOf": [{"$ref": "#/$defs/P"}, YR]}, "P": {"oneOf": [XR, KY]}},
         "$ref": "#/$defs/O"},
        [JUST_X, JUST_Y, '{"k": "y"}'], [EMPTY, BOTH, '{"k": "y", "x": 1}'],
    ),
    "oneOf": ({"oneOf": [XR, YR]}, [JUST_X, JUST_Y], [EMPTY, BOTH]),
    "oneOf by a constant": (
        {"oneOf": [KX, KY]}, ['{"k": "x", "x": 1}', '{"k": "y"}'],
        [EMPTY, '{"k": "x", "y": 1}', '{"k": "z"}'],
    ),
    "oneOf beside properties": (
        {"properties": {"z": INT}, "required": ["z"], "oneOf": [XR, YR]},
        ['{"z": 1, "x": 1}', '{"z": 1, "y": 1}'], [JUST_X, '{"z": 1}', '{"z": 1, "x": 1, "y": 1}'],
    ),
    "allOf": ({"allOf": [XR, YR]}, [BOTH], [EMPTY, JUST_X, JUST_Y, '{"x": 1, "y": 1, "z": 1}']),
    "allOf of one": (
        {"$defs": {"O": XR}, "allOf": [{"$ref": "#/$defs/O"}]}, [JUST_X], [EMPTY, BOTH],
    ),
    "allOf with true": ({"allOf": [True, X]}, [EMPTY, JUST_X], [JUST_Y]),
    "allOf with anyOf": (
        {"allOf": [X, {"anyOf": [YR, {"properties": {"z": INT}, "required": ["z"]}]}]},
        [JUST_Y, BOTH, '{"z": 1}'], [EMPTY, JUST_X, '{"y": 1, "w": 1}'],
    ),
    "patterns": (
        {"$defs": {"O": {"patternProperties": {"^x": INT}}}, "$ref": "#/$defs/O"},
        [EMPTY, JUST_X, '{"xx": 1}'], [JUST_Y],
    ),
    "at least one": ({"type": "object", "minProperties": 1}, [JUST_X, '{"z": "a"}'], [EMPTY]),
    "one object": ({"const": {"x": 1}}, [JUST_X], [EMPTY, JUST_Y]),
    "some objects": ({"enum": [{"x": 1}, {"y": 1}]}, [JUST_X, JUST_Y], [EMPTY, BOTH]),
    "recursive model": (
        Node.model_json_schema(),
        ['{"v": 1}', '{"v": 2, "n": null}', '{"v": 1, "n": {"v": 2}}'],
        [EMPTY, '{"v": 3}', '{"v": 1, "z": 1}', '{"v": 1, "n": {"v": 3}}'],
    ),
    "recursive union": (
        Pet.model_json_schema(),
        ['{"kind": "cat", "lives": 9}', '{"kind": "dog"}',
         '{"kind": "dog", "friend": {"kind": "dog"}}'],
        [EMPTY, '{"kind": "dog", "lives": 9}', '{"kind": "cow"}'],
    ),
    "union": (
        TypeAdapter(Cat | Node).json_schema(),
        ['{"kind": "cat", "lives": 7}', '{"v": 1}'], [EMPTY, '{"kind": "cat", "lives": 7, "v": 1}'],
    ),
    "refers to itself": (
        {"type": "object", "properties": {"x": INT, "y": {"$ref": "#"}}},
        [EMPTY, JUST_X, '{"y": {"x": 1}}'], [JUST_Y, '{"z": 1}'],
    ),
}  # fmt: skip


@cache
def tokenizer() -> tuple[PreTrainedTokenizerFast, LLTokenizer]:
    model = load_tokenizer(demo_path())
    assert isinstance(model, PreTrainedTokenizerFast)
    end = [model.eos_token_id]
    return model, LLTokenizer(model.backend_tokenizer.to_str(), n_vocab=len(model), eos_token=end)


def matcher(schema: Any) -> Matcher:
    function = FunctionDefinition(name="f", parameters=schema)
    rules = with_start(call_grammar(PLAIN_JSON, [function], {}, max_calls=1), "calls", "")
    model, prepared = tokenizer()
    return Matcher(prepared, ("grammar", rules), len(model), [model.eos_token_id])


def ends_after(schema: Any, arguments: str) -> bool:
    """Whether a call with these arguments may come, and end the answer."""
    model, _ = tokenizer()
    one = matcher(schema)
    ids = model.encode(PLAIN_JSON.spell([("f", arguments)]), add_special_tokens=False)
    rows, masks = one.follow(ids, range(-1, len(ids) - 1))
    return len(rows) == 1 + len(ids) and model.eos_token_id in allowed(masks[-1])


def allowed(mask: np.ndarray[Any, Any]) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def written(schema: Any, draw: random.Random, most: int = 200) -> Any:
    """Arguments by a model that chooses blindly, but half of the time for the end of something."""
    model, _ = tokenizer()
    ends = set(model.convert_tokens_to_ids(['"', "}", '"}', "e"]))
    one, ids = matcher(schema), list[int]()
    while len(ids) < most:
        choices = allowed(one.follow([], [])[1][0])
        if model.eos_token_id in choices:
            ((call),) = json.loads(model.decode(ids))
            return call["arguments"]
        ending = [token for token in choices if token in ends]
        ids.append(draw.choice(ending if ending and draw.random() < 0.5 else choices))
        one.advance(ids[-1:])
    pytest.fail(f"no end: {model.decode(ids)}")


@pytest.mark.parametrize("name", ROOTS)
def test_what_each_root_allows(name: str) -> None:
    schema, good, bad = ROOTS[name]
    for text in good:
        assert ends_after(schema, text), text
        if schema is not None:
            Draft202012Validator(schema).validate(json.loads(text))
    for text in bad:
        assert not ends_after(schema, text), text


@pytest.mark.parametrize("name", ROOTS)
def test_arguments_of_a_blind_model_are_valid(name: str) -> None:
    schema = ROOTS[name][0] or {}
    for seed in range(8):
        arguments = written(schema, random.Random(seed))
        Draft202012Validator(schema).validate(arguments)
        assert isinstance(arguments, dict)


@pytest.mark.parametrize(
    "schema",
    [
        # What fits the second branch fits the first, too: nothing that may be told apart.
        {"oneOf": [XR, {**XR, "required": ["x", "y"]}]},
        {"oneOf": [X, {"type": "object", "properties": {"y": INT}}]},
        {"type": "array"},
        {"$ref": "#/$defs/O", "$defs": {"O": {"type": "array"}}},
        {"$ref": "#/$defs/missing"},
        {"$ref": "https://example.org/schema"},
        {"properties": 1, "required": 2, "anyOf": 3, "patternProperties": [], "allOf": {}},
        {"oneOf": [1, {"required": "x"}], "properties": {"x": 1}},
    ],
)
def test_what_cannot_be_followed_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError):
        matcher(schema)


def test_a_schema_too_large_to_close_stays_open() -> None:
    """Closing writes all names beside a choice into each branch: that must not grow without end."""
    names = [f"name{index}" for index in range(6000)]
    many = {"properties": dict.fromkeys(names, True), "anyOf": [{"required": [n]} for n in names]}
    doubling = {
        "$defs": {
            f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 2} for level in range(40)
        },
        "$ref": "#/$defs/d0",
    }
    chain = {
        "$defs": {f"d{level}": {"$ref": f"#/$defs/d{level + 1}"} for level in range(5000)},
        "$ref": "#/$defs/d0",
    }
    for schema in (many, doubling, chain, {"$ref": "#"}, {"anyOf": [{"$ref": "#"}, XR]}):
        closed = argument_schema(FunctionDefinition(name="f", parameters=schema))
        assert len(json.dumps(closed)) < 2 * len(json.dumps(schema)) + 1000
