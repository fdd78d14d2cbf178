"""Messages between coordinator and stages: all of a step comes back, and garbage is no message."""

from __future__ import annotations

import math
import pickle
import types
import typing
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from draftline.cluster.transport.messages import (
    decode_result,
    decode_step,
    encode_result,
    encode_step,
)
from draftline.core.errors import DeviceLost, ProtocolError, StageError, StageLost
from draftline.core.steps import StepInput, StepOutput, VerificationResult
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.fakes.fake_stage import fake_step

SCALARS = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(),
    bool: st.booleans(),
    str: st.text(),
    types.NoneType: st.none(),
}
shapes = arrays.array_shapes(min_dims=1, max_dims=2, min_side=0, max_side=3)


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of an annotation; of a class, with every field by its own annotation."""
    origin, args = get_origin(kind), get_args(kind)
    if kind in SCALARS:
        return SCALARS[kind]
    if origin is np.ndarray:
        return arrays.arrays(get_args(args[1])[0], shapes)
    if origin in (types.UnionType, Union):
        return st.one_of(*map(any_of, args))
    if origin is list or (origin is tuple and args[1:] == (...,)):
        return st.lists(any_of(args[0]), max_size=3).map(origin)
    if origin is tuple:
        return st.tuples(*map(any_of, args))
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: any_of(hint) for name, hint in hints.items()})


steps, outputs = any_of(StepInput), any_of(StepOutput)


def assert_same(left: Any, right: Any) -> None:
    """Equal with types and bits: NaN is NaN, int32 is not int64."""
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert left.tobytes() == right.tobytes()
    elif is_dataclass(left):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name))
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for pair in zip(left, right, strict=True):
            assert_same(*pair)
    else:
        assert left == right or (math.isnan(left) and math.isnan(right))


@given(st.integers(0, 2**63), steps)
def test_all_of_a_step_comes_back(sequence: int, step: StepInput) -> None:
    got = decode_step(encode_step(sequence, step))
    assert got.sequence == sequence
    assert_same(got.step, step)


@given(st.integers(0, 2**63), outputs)
def test_all_of_an_answer_comes_back(sequence: int, output: StepOutput) -> None:
    got, answer = decode_result(bytearray(encode_result(sequence, output)))
    assert got == sequence
    assert_same(answer, output)


@pytest.mark.parametrize("kind", [StageError, StageLost, DeviceLost])
def test_errors_come_back_as_what_they_were(kind: type[StageError | StageLost]) -> None:
    sequence, error = decode_result(encode_result(7, kind("stage 1 failed on step 5: \u2620")))
    assert (sequence, type(error), str(error)) == (7, kind, "stage 1 failed on step 5: \u2620")


def test_numbers_of_numpy_are_numbers() -> None:
    result = VerificationResult([1], typing.cast("int", np.int32(9)))
    output = replace(output_of(fake_step(3)), verification_results=(result,))
    _, answer = decode_result(encode_result(0, output))
    assert isinstance(answer, StepOutput)
    assert answer.verification_results == (VerificationResult([1], 9),)


def test_stages_may_write_into_what_came() -> None:
    """Compiled code and torch take arrays that cannot be written for another kind."""
    step = decode_step(encode_step(0, fake_step(1))).step
    assert all(array.flags.writeable for array in (step.token_ids, step.sampling.seed, step.moves))


def output_of(step: StepInput) -> StepOutput:
    return StepOutput(step.step_id, step.token_ids, step.moves, step.sampling.temperature)


STEP = encode_step(4, fake_step(1))
ANSWER = encode_result(4, output_of(fake_step(1)))
FAILURE = encode_result(4, StageError("no"))
DECODERS: list[Callable[[bytes], object]] = [decode_step, decode_result]


@given(st.sampled_from(DECODERS), st.binary(max_size=64))
def test_garbage_is_a_protocol_error(decode: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a message between stages"):
        decode(data)


@pytest.mark.parametrize("whole", [STEP, ANSWER, FAILURE])
def test_a_truncated_message_is_a_protocol_error(whole: bytes) -> None:
    decode = decode_step if whole is STEP else decode_result
    decode(whole)
    for end in range(len(whole)):
        with pytest.raises(ProtocolError):
            decode(whole[:end])
    with pytest.raises(ProtocolError):
        decode(whole + b"\0")


RESULTS = (StepOutput, StageError, StageLost)


@given(st.sampled_from([STEP, ANSWER, FAILURE]), st.data())
def test_a_damaged_message_is_a_protocol_error_or_decodes(whole: bytes, data: st.DataObject):
    damaged = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    for decode, kinds in ((decode_step, StepInput), (decode_result, RESULTS)):
        try:
            sequence, value = decode(damaged)
        except ProtocolError:
            continue
        assert isinstance(sequence, int)
        assert isinstance(value, kinds)


@pytest.mark.parametrize(
    "data",
    [
        STEP.replace(b"token_ids", b"toxen_ids"),
        STEP.replace(b"<i4", b"<i8"),
        FAILURE.replace(b"step", b"stop"),
        b"\x92\x04\x81\xa5trees" + b"\x91" * 100_000,
        b"\x92\x04\x81\xa9token_ids\x81\x81\1\2\3",
        b"\x92\x04\x81\xa9token_ids\xdd\xff\xff\xff\xff",
        b"\x92\x04\x92\xa4step\xa1\xff",
    ],
    ids=["field", "dtype", "kind", "depth", "key", "length", "text"],
)
def test_what_only_looks_like_a_message_is_a_protocol_error(data: bytes) -> None:
    for decode in (decode_step, decode_result):
        with pytest.raises(ProtocolError):
            decode(data)


WRONG = {
    "wide": lambda array: array.astype(np.int64 if array.dtype == np.int32 else np.float64),
    "scalar": lambda _array: np.zeros((), dtype=np.int32),
    "deep": lambda array: array[..., None, None],
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("field", ["token_ids", "block_tables", "sampling.temperature"])
def test_an_array_of_another_kind_is_refused_by_name(field: str, wrong: str) -> None:
    step = fake_step(1)
    name = field.rpartition(".")[2]
    owner = step.sampling if "." in field else step
    changed = replace(owner, **{name: WRONG[wrong](getattr(owner, name))})
    step = replace(step, sampling=changed) if "." in field else changed
    with pytest.raises(ProtocolError, match=rf"\$\[1\]\.{field}`"):
        decode_step(encode_step(0, step))


class Trap:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.path,)


def test_nothing_is_ever_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "touched"
    data = pickle.dumps(Trap(path))
    for decode in DECODERS:
        with pytest.raises(ProtocolError):
            decode(data)
    assert not path.exists()
    pickle.loads(data)
    assert path.exists()


def test_a_step_that_has_no_encoding_is_refused() -> None:
    step = fake_step(6)
    for wrong in ({"probe_top_k": 2**70}, {"slots": step.slots.astype(object)}):
        with pytest.raises(ProtocolError, match="step 6 has no encoding"):
            encode_step(0, replace(step, **wrong))


@pytest.mark.parametrize("token", [2**70, object()])
def test_an_answer_that_has_no_encoding_ends_its_step_alone(token: Any) -> None:
    output = replace(output_of(fake_step(6)), verification_results=(VerificationResult([], token),))
    sequence, answer = decode_result(encode_result(3, output))
    assert sequence == 3
    assert isinstance(answer, StageError)
    assert "answer to step 6 has no encoding" in str(answer)
