"""Messages between coordinator and stages: all of a step comes back, and garbage is no message."""

from __future__ import annotations

import pickle
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest
from draftline.cluster.transport.messages import (
    StepReader,
    StepWriter,
    decode_result,
    encode_result,
)
from draftline.core.arrays import PackedArray, pack, unpack
from draftline.core.errors import DeviceLost, ProtocolError, StageError, StageLost
from draftline.core.steps import (
    LogitEdits,
    LogProbInput,
    LogProbOutput,
    StepInput,
    StepOutput,
    VerificationResult,
)
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from support.fakes.fake_stage import fake_step
from support.inputs.step_sequences import StepWorld
from support.tools.same_values import assert_same

SCALARS = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(),
    bool: st.booleans(),
    str: st.text(),
    types.NoneType: st.none(),
}
DTYPES = ("<i4", "<i8", "<u4", "<u8", "<f4", "<f8", "|b1")
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


outputs = any_of(StepOutput)


def encode_step(sequence: int, step: StepInput) -> bytes:
    """The first message of a run, for the last stage."""
    return StepWriter(3).write(sequence, step).whole


def decode_step(data: bytes | bytearray) -> tuple[int, StepInput]:
    """As a stage that has read nothing yet."""
    return StepReader().read(data)


@given(st.integers(0, 2**63), st.integers(0, 2**32))
def test_all_of_a_step_comes_back(sequence: int, seed: int) -> None:
    world = StepWorld(seed)
    writer, first, last = StepWriter(5), StepReader(), StepReader()
    for number in range(sequence, sequence + 4):
        world.arrive()
        step = world.step()
        payloads = writer.write(number, step)
        expected = step if step.heads.tasks else replace(step, request_keys=())
        assert_same(last.read(payloads.whole), (number, expected))
        got_number, got = first.read(payloads.rows)
        assert got_number == number
        states = ("state_slots", "state_loads", "state_saves")
        for name in ("token_ids", "slots", "block_tables", "trees", "moves", "is_traced", *states):
            assert_same(getattr(got, name), getattr(expected, name))
        assert not len(got.logits_rows)
        assert not got.edits


def test_only_the_last_stage_is_sent_what_is_chosen() -> None:
    step = fake_step(3, num_rows=64)
    mask = np.arange(4000, dtype=np.uint32)[None]
    none = step.logits_rows[:0]
    step = replace(step, edits=(LogitEdits(0, 64, none, none.astype(np.float32), None, mask),))
    writer = StepWriter(1)
    payloads = writer.write(0, step)
    assert len(payloads.whole) - len(payloads.rows) > mask.nbytes
    assert len(writer.write(1, step).whole) < mask.nbytes


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
    _, step = decode_step(encode_step(0, fake_step(1)))
    arrays = (step.token_ids, step.sampling.seed, step.moves, step.block_tables)
    assert all(array.flags.writeable for array in arrays)


def output_of(step: StepInput) -> StepOutput:
    return StepOutput(
        step.step_id, step.token_ids, step.moves, LogProbOutput(step.sampling.temperature)
    )


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
    "wide": np.zeros(3, dtype=np.int64),
    "scalar": np.zeros((), dtype=np.int32),
    "deep": np.zeros((1, 1, 1), dtype=np.int32),
}
ROWS, CHOICE = 3, 4


def inside(message: Any, path: Sequence[str | int]) -> Any:
    """What stands at `path` in a message as msgpack sees it."""
    for key in path:
        message = message[key]
    return message


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(
    "path", [(ROWS, "token_ids"), (ROWS, "tables", "blocks"), (CHOICE, "sampling", "top_k")]
)
def test_an_array_of_another_kind_is_refused_by_name(path: tuple[Any, ...], wrong: str) -> None:
    message = msgspec.msgpack.decode(STEP)
    inside(message, path[:-1])[path[-1]] = pack(WRONG[wrong])
    name = ".".join(path[1:])
    with pytest.raises(ProtocolError, match=rf"\$\[{path[0]}\]\.{name}`"):
        decode_step(msgspec.msgpack.encode(message))


@pytest.mark.parametrize("field", ["block_tables", "positions", "temperature"])
def test_a_step_with_an_array_of_another_kind_has_no_encoding(field: str) -> None:
    step = fake_step(1)
    if field == "temperature":
        wrong = replace(step.sampling, temperature=step.sampling.temperature.astype(np.float64))
        step = replace(step, sampling=wrong)
    else:
        step = replace(step, **{field: getattr(step, field).astype(np.int64)})
    with pytest.raises(ProtocolError, match=f"step 1 has no encoding: {field.replace('_', ' ')} "):
        encode_step(0, step)


def array_paths(message: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a message as msgpack sees it has arrays."""
    if isinstance(message, list) and message and message[0] in DTYPES:
        yield path
    elif isinstance(message, dict | list):
        for key, value in message.items() if isinstance(message, dict) else enumerate(message):
            yield from array_paths(value, (*path, key))


def other_array(packed: list[Any], data: st.DataObject) -> PackedArray:
    """Another array of the same type: shorter, longer, or with other numbers."""
    array = unpack(PackedArray(*packed), packed[0], "array", (1, 2))
    change = data.draw(st.sampled_from(["cut", "twice", "numbers", "flat"]))
    if change == "numbers" and array.size:
        value = data.draw(st.sampled_from([-(2**31), -2, -1, 0, 1, 2, 1000, 2**31 - 1]))
        array.flat[data.draw(st.integers(0, array.size - 1))] = np.asarray(value).astype(
            array.dtype
        )
    changed = {"cut": array[:-1], "twice": np.concatenate((array, array)), "flat": array.ravel()}
    return pack(changed.get(change, array))


@given(st.integers(0, 2**32), st.data())
def test_a_delta_of_other_arrays_is_a_protocol_error_or_a_step(
    seed: int, data: st.DataObject
) -> None:
    """Numbers that fit nothing that is kept never reach it, and never a compiled loop."""
    world, writer, reader = StepWorld(seed), StepWriter(1), StepReader()
    for number in range(4):
        world.arrive()
        payload = writer.write(number, world.step()).whole
        if number < 3:
            reader.read(payload)
    message = msgspec.msgpack.decode(payload)
    *above, key = data.draw(st.sampled_from(list(array_paths(message))))
    owner = inside(message, above)
    owner[key] = other_array(owner[key], data)
    try:
        number, step = reader.read(msgspec.msgpack.encode(message))
    except ProtocolError:
        return
    assert number == 3
    assert isinstance(step, StepInput)


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
    for wrong in ({"log_probs": LogProbInput(num_top=2**70)}, {"slots": step.slots.astype(object)}):
        with pytest.raises(ProtocolError, match="step 6 has no encoding"):
            encode_step(0, replace(step, **wrong))


@pytest.mark.parametrize("token", [2**70, object()])
def test_an_answer_that_has_no_encoding_ends_its_step_alone(token: Any) -> None:
    output = replace(output_of(fake_step(6)), verification_results=(VerificationResult([], token),))
    sequence, answer = decode_result(encode_result(3, output))
    assert sequence == 3
    assert isinstance(answer, StageError)
    assert "answer to step 6 has no encoding" in str(answer)
