"""A buffer that is filled while its last contents are under way."""

from __future__ import annotations

import pytest
import torch
from draftline.kernels.device_tables import StagedBuffer


class FakeEvent:
    """Says when it is recorded and waited for."""

    def __init__(self, name: str, said: list[str]) -> None:
        self._name, self._said = name, said

    def record(self) -> None:
        self._said.append(f"record {self._name}")

    def synchronize(self) -> None:
        self._said.append(f"wait {self._name}")


def test_the_host_waits_for_the_copy_before_last_alone() -> None:
    buffer = StagedBuffer(4, torch.device("cpu"))
    said: list[str] = []
    buffer._copied = [FakeEvent(name, said) for name in "ab"]
    for number in range(3):
        buffer.next()[:] = number
        buffer.send(4)
    assert said == ["wait b", "record b", "wait a", "record a", "wait b", "record b"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_was_sent_stays_while_the_next_is_written(device: str) -> None:
    buffer = StagedBuffer(4, torch.device(device))
    first = buffer.next()
    first[:] = [1, 2, 3, 4]
    buffer.send(4)
    second = buffer.next()
    second[:] = 9
    assert first.tolist() == [1, 2, 3, 4]
    assert buffer.device.tolist() == [1, 2, 3, 4]
    buffer.send(2)
    assert buffer.device.tolist() == [9, 9, 3, 4]
    assert buffer.next() is first
