"""Kernels are interpreted where no device answers, whatever files there are."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


class Nvml:
    """A driver's library that counts so many devices, or refuses."""

    def __init__(self, count: int, status: int = 0) -> None:
        self._count, self._status = count, status

    def nvmlInit_v2(self) -> int:  # noqa: N802 - the library's name
        return self._status

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802 - the library's name
        count._obj.value = self._count
        return self._status


@pytest.fixture
def device_answers(request: pytest.FixtureRequest) -> Any:
    plugin = request.config.pluginmanager.get_plugin(str(CONFTEST))
    assert plugin is not None
    return plugin.device_answers


@pytest.mark.parametrize(
    ("library", "expected"),
    [(Nvml(1), True), (Nvml(8), True), (Nvml(0), False), (Nvml(1, status=9), False)],
)
def test_the_driver_is_asked(
    library: Nvml, expected: bool, device_answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert device_answers() is expected


def test_without_a_driver_none_answers(
    device_answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert device_answers() is False
