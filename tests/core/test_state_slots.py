"""Slots of states: one for each running request, and snapshots that make room for newer ones."""

from __future__ import annotations

from draftline.core.state_slots import NO_SLOT, StateSlots

KEYS = [bytes([number]) * 16 for number in range(5)]


def filled(slots: StateSlots, key: bytes) -> int:
    slot = slots.reserve(key)
    slots.note_filled(key, slot)
    return slot


def test_running_requests_share_no_slot_and_snapshots_have_others() -> None:
    slots = StateSlots(2, 2)
    taken = {slots.take(), slots.take()}
    assert taken == {0, 1}
    assert {filled(slots, KEYS[0]), filled(slots, KEYS[1])} == {2, 3}
    slots.give_back(1)
    assert slots.take() == 1


def test_nobody_goes_on_from_a_snapshot_before_its_step_has_finished() -> None:
    slots = StateSlots(1, 2)
    slot = slots.reserve(KEYS[1])
    assert slots.longest(KEYS) == 0
    assert slots.reserve(KEYS[1]) == NO_SLOT
    slots.note_filled(KEYS[1], slot)
    assert slots.longest(KEYS) == 2
    assert slots.longest(KEYS[:1]) == 0
    slots.forget(KEYS)
    assert slots.longest(KEYS) == 0


def test_the_snapshot_that_was_used_least_recently_makes_room() -> None:
    slots = StateSlots(1, 2)
    first, second = filled(slots, KEYS[0]), filled(slots, KEYS[1])
    slots.unpin(slots.pin(KEYS[0]))
    assert filled(slots, KEYS[2]) == second
    # Not while a step is about to read it.
    assert slots.pin(KEYS[0]) == first
    assert filled(slots, KEYS[3]) == second
    slots.pin(KEYS[3])
    assert slots.reserve(KEYS[4]) == NO_SLOT
    slots.unpin(first)
    assert filled(slots, KEYS[4]) == first


def test_a_step_that_finishes_late_fills_no_snapshot_of_others() -> None:
    slots = StateSlots(1, 1)
    slot = slots.reserve(KEYS[0])
    assert slots.reserve(KEYS[1]) == slot
    slots.note_filled(KEYS[0], slot)
    assert slots.longest(KEYS[:1]) == 0
    slots.forget_snapshots()
    slots.note_filled(KEYS[1], slot)
    assert slots.longest(KEYS) == 0


def test_models_without_states_take_none() -> None:
    slots = StateSlots(0, 3)
    assert not slots.keeps_states
    slots.give_back(slots.take())
    assert slots.take() == NO_SLOT
