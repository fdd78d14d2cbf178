"""Whatever happens to requests, stages and messages, a decoded step is the one that was encoded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from draftline.cluster.transport.step_codec.decoder import NO_CHOICE, StepDecoder
from draftline.cluster.transport.step_codec.encoder import StepEncoder
from draftline.core.errors import ProtocolError
from draftline.core.steps import (
    AT_LEAVES,
    NO_HEADS,
    NO_LOG_PROBS,
    NO_PROBES,
    HeadInput,
    HeadTask,
    StepInput,
)
from hypothesis import given
from hypothesis import strategies as st
from support.inputs.step_sequences import StepWorld
from support.inputs.steps import PagedRequest, make_step
from support.tools.same_values import assert_same

EVENTS = ("step", "step", "step", "arrive", "end", "preempt", "grammar", "failed", "replaced")
REST = {"log_probs": NO_LOG_PROBS, "probes": NO_PROBES, "heads": NO_HEADS}


def rows_of(step: StepInput) -> StepInput:
    """What a stage before the last gets."""
    return replace(step, **NO_CHOICE, **REST, verification=None, edits=(), request_keys=())


def told(step: StepInput) -> StepInput:
    """What the last stage gets."""
    return step if step.heads.tasks else replace(step, request_keys=())


class Link:
    """One sender, a stage that chooses nothing, and the last stage."""

    def __init__(self) -> None:
        self.epoch = 0
        self.first, self.last = StepDecoder(), StepDecoder()
        self.connect()

    def connect(self) -> None:
        """A new run of the same stages."""
        self.epoch += 1
        self.encoder = StepEncoder(self.epoch)

    def replace_first(self) -> None:
        """A stage dies; the other one keeps its process."""
        self.first = StepDecoder()
        self.connect()

    def fail(self, step: StepInput) -> None:
        """A step that has no encoding."""
        with pytest.raises(TypeError):
            self.encoder.encode(replace(step, request_starts=step.request_starts[:-1]))
        rows = np.full(1, 1000, dtype=np.int32)
        with pytest.raises(TypeError):
            self.encoder.encode(replace(step, logits_rows=rows))
        if step.edits:
            # The last thing that is looked at, behind much that was kept already.
            *edits, last = step.edits
            with pytest.raises(TypeError):
                self.encoder.encode(replace(step, edits=(*edits, replace(last, first_row=1000))))

    def send(self, step: StepInput) -> None:
        """A step there and back."""
        delta = self.encoder.encode(step)
        assert_same(self.last.decode(delta), told(step))
        assert_same(self.first.decode(replace(delta, choice=None)), rows_of(step))


@given(st.integers(0, 2**32), st.lists(st.sampled_from(EVENTS), min_size=5, max_size=40))
def test_every_step_comes_back_whole(seed: int, events: list[str]) -> None:
    world, link = StepWorld(seed), Link()
    for _ in range(3):
        world.arrive()
    happens = {
        "step": lambda: link.send(world.step()),
        "arrive": world.arrive,
        "end": world.end,
        "preempt": world.preempt,
        "grammar": world.change_grammar,
        "failed": lambda: link.fail(world.step()),
        "replaced": link.replace_first,
    }
    for event in events:
        happens[event]()


def busy_step(world: StepWorld) -> StepInput:
    """One that has all that is kept."""
    while True:
        world.arrive()
        edits = (step := world.step()).edits
        counted = [edit for edit in edits if edit.penalties and len(edit.penalties.tokens)]
        if counted and step.block_tables.any() and any(edit.mask is not None for edit in edits):
            return step


def test_what_did_not_change_is_not_sent_again() -> None:
    encoder, step = StepEncoder(1), replace(busy_step(StepWorld(3)), request_keys=())
    first, again = encoder.encode(step), encoder.encode(step)
    assert len(first.rows.tables.blocks)
    assert not len(again.rows.tables.blocks)
    for delta in (first, again):
        assert delta.choice is not None
        assert delta.choice.edits is not None
    assert len(first.choice.edits.tokens)
    assert not len(again.choice.edits.tokens)
    assert not len(again.choice.edits.counts)
    assert not len(again.choice.edits.bias)
    assert len(first.choice.edits.masks.new_masks)
    assert not len(again.choice.edits.masks.new_masks)


@pytest.mark.parametrize("num_lost", [1, 3])
def test_a_delta_against_a_message_that_was_lost_is_refused(num_lost: int) -> None:
    world, encoder, decoder = StepWorld(4), StepEncoder(1), StepDecoder()
    decoder.decode(encoder.encode(world.step()))
    for _ in range(num_lost):
        encoder.encode(world.step())
    for _ in range(2):
        with pytest.raises(ProtocolError, match="is a delta against message"):
            decoder.decode(encoder.encode(world.step()))


def test_a_delta_of_another_run_is_refused() -> None:
    world, decoder = StepWorld(5), StepDecoder()
    encoders = [StepEncoder(1), StepEncoder(2)]
    for encoder in encoders:
        decoder.decode(encoder.encode(world.step()))
    with pytest.raises(ProtocolError, match="message 0 of epoch 1, which is not the last here"):
        decoder.decode(encoders[0].encode(world.step()))


def test_a_stage_that_begins_in_the_middle_knows_nothing() -> None:
    world, encoder = StepWorld(6), StepEncoder(1)
    encoder.encode(world.step())
    with pytest.raises(ProtocolError, match="message 0 of epoch 1"):
        StepDecoder().decode(encoder.encode(world.step()))


@pytest.mark.parametrize("places", [(-1,), (0, 0), (99,)])
def test_features_are_of_requests_of_the_step(places: tuple[int, ...]) -> None:
    delta = StepEncoder(1).encode(busy_step(StepWorld(7)))
    assert delta.choice is not None
    heads = HeadInput(feature_requests=places)
    wrong = replace(delta, choice=replace(delta.choice, heads=heads, request_keys=()))
    with pytest.raises(ProtocolError, match="features or drafts are of no request"):
        StepDecoder().decode(wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tasks": (HeadTask("a", (99,), (1,), (1,)),)}, "are of no request"),
        ({"tasks": (HeadTask("a", (0,), (-1,), (1,)),)}, "a head is to draft no tree"),
        ({"tasks": (HeadTask("a", (0,), (), (1,)),)}, "a head is to draft no tree"),
        ({"tasks": (HeadTask("a", (0,), (1,), ()),)}, "to draft after no outcome"),
        ({"tasks": (HeadTask("a", (0,), (1,), (-1,)),)}, "to draft after no outcome"),
        (
            {"tasks": (HeadTask("a", (0,), (1,), (2 * AT_LEAVES,)),)},
            "to draft after no outcome",
        ),
        ({"tasks": (HeadTask("a", (0,), (1,), (1,), -1.0),)}, "less than nothing"),
        ({"tasks": (HeadTask("a", (0,), (1,), (1,), math.nan),)}, "less than nothing"),
        ({"tasks": (HeadTask("a", (), (), ()),), "following_tokens": None}, "lack the tokens"),
        ({"following_tokens": np.zeros(99, dtype=np.int32)}, "tokens follow no prompt"),
    ],
)
def test_tasks_of_heads_are_of_requests_of_the_step(wrong: dict[str, Any], said: str) -> None:
    delta = StepEncoder(1).encode(busy_step(StepWorld(7)))
    assert delta.choice is not None
    heads = replace(HeadInput(following_tokens=np.zeros(1, dtype=np.int32)), **wrong)
    num_keys = len(delta.rows.context_lens) if heads.tasks else 0
    keys = {"request_keys": tuple(range(num_keys))}
    with pytest.raises(ProtocolError, match=said):
        StepDecoder().decode(replace(delta, choice=replace(delta.choice, heads=heads, **keys)))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"state_slots": [0, 0]}, "states are of other requests"),
        ({"state_slots": [0]}, "states are of other requests"),
        ({"state_slots": [0, -1]}, "states are of other requests"),
        ({"state_slots": [[0, 1]]}, "state slots"),
        ({"state_slots": [], "state_loads": [[2, 1]]}, "copied states are of other requests"),
        ({"state_loads": [[1, 2]]}, "copied states are of other requests"),
        ({"state_saves": [[2, 1]]}, "copied states are of other requests"),
        ({"state_loads": [[-1, 1]]}, "states have no slot"),
        ({"state_saves": [[0, -1]]}, "states have no slot"),
        ({"state_saves": [0, 2]}, "states are copied nowhere"),
    ],
)
def test_states_are_of_requests_of_the_step(wrong: dict[str, Any], said: str) -> None:
    request = PagedRequest([0])
    delta = StepEncoder(1).encode(make_step([request.chunk([3], 0), request.chunk([4], 0)]))
    copies = {"state_loads": [[5, 1]], "state_saves": [[0, 6]]}
    for states in (copies, copies | wrong):
        arrays = {name: np.array(value, dtype=np.int32) for name, value in states.items()}
        rows = replace(delta.rows, **arrays)
        if states is copies:
            StepDecoder().decode(replace(delta, rows=rows))
            continue
        with pytest.raises(ProtocolError, match=said):
            StepDecoder().decode(replace(delta, rows=rows))


def test_request_keys_belong_to_tasks() -> None:
    delta = StepEncoder(1).encode(busy_step(StepWorld(7)))
    assert delta.choice is not None
    wrong = replace(delta, choice=replace(delta.choice, request_keys=(1,) * 99))
    with pytest.raises(ProtocolError, match="keys are of no request"):
        StepDecoder().decode(wrong)


def test_a_message_that_is_broken_ends_the_run() -> None:
    """What a broken message has changed already is never read."""
    world, encoder, decoder = StepWorld(7), StepEncoder(1), StepDecoder()
    decoder.decode(encoder.encode(busy_step(world)))
    delta = encoder.encode(busy_step(world))
    tables = replace(delta.rows.tables, blocks=np.zeros(999, dtype=np.int32))
    with pytest.raises(ProtocolError, match="block tables are cut short, too many"):
        decoder.decode(replace(delta, rows=replace(delta.rows, tables=tables)))
    with pytest.raises(ProtocolError, match="not the last here"):
        decoder.decode(delta)
    encoder.forget()
    step = world.step()
    assert_same(decoder.decode(encoder.encode(step)), told(step))
