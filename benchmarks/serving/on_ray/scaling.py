"""Replicas that follow the load up and down, with requests that must not notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx

from ....deploy.settings.settings import APP_NAME

# Clients of the calm, and of the rush.
CALM, RUSH = 1, 8
MOST_REPLICAS = 4
TIMEOUT_S = 240.0
POLL_S = 0.2
# How long the load stays once the replicas have followed it.
HOLD_S = 10.0


class Clients:
    """Clients that ask without a pause until told to end; their answers against those known.

    known  texts by the numbers of the bodies
    """

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]], known: Sequence[str]) -> None:
        self._url = url
        self._bodies = bodies
        self._known = known
        self._end = threading.Event()
        self.num_answers = self.num_failed = self.num_other = 0
        self._lock = threading.Lock()

    def ask(self, first: int) -> None:
        """Ask for the bodies in turn, from one on."""
        with httpx.Client(base_url=self._url, timeout=120.0) as client:
            number = first
            while not self._end.is_set():
                index = number % len(self._bodies)
                answer = client.post("/v1/completions", json=self._bodies[index])
                with self._lock:
                    self.num_answers += 1
                    self.num_failed += not answer.is_success
                    self.num_other += answer.is_success and text_of(answer) != self._known[index]
                number += 1

    def end(self) -> None:
        """End after the requests that are under way."""
        self._end.set()


def text_of(answer: httpx.Response) -> str:
    """The text of a completion."""
    return answer.json()["choices"][0]["text"]


def measure_scaling(url: str, bodies: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A calm, a rush, and a calm again: how soon the replicas follow, and what failed."""
    with httpx.Client(base_url=url, timeout=120.0) as client:
        known = [
            text_of(client.post("/v1/completions", json=body).raise_for_status()) for body in bodies
        ]
    calm, rush = Clients(url, bodies, known), Clients(url, bodies, known)
    with ThreadPoolExecutor() as pool, ExitStack() as ends:
        ends.callback(rush.end)
        ends.callback(calm.end)
        asking = [pool.submit(calm.ask, index) for index in range(CALM)]
        asking += [pool.submit(rush.ask, 7 * index) for index in range(RUSH)]
        up_s = _until(MOST_REPLICAS)
        time.sleep(HOLD_S)
        rush.end()
        down_s = _until(1)
        time.sleep(HOLD_S)
        calm.end()
        for future in asking:
            future.result(TIMEOUT_S)
    return {
        "up_to": MOST_REPLICAS,
        "up_s": round(up_s, 1),
        "down_s": round(down_s, 1),
        "requests": calm.num_answers + rush.num_answers,
        "failed": calm.num_failed + rush.num_failed,
        "other_texts": calm.num_other + rush.num_other,
    }


def _until(count: int) -> float:
    """Seconds until there are so many replicas, all of which serve."""
    began = time.monotonic()
    while _replica_states() != {"RUNNING": count}:
        if time.monotonic() - began > TIMEOUT_S:
            raise RuntimeError(f"there are not {count} replicas after {TIMEOUT_S:g} s")
        time.sleep(POLL_S)
    return time.monotonic() - began


def _replica_states() -> dict[str, int]:
    """How many replicas of the engine are in each state."""
    # Ray reads its environment when it is imported.
    from ray import serve  # noqa: PLC0415

    states = serve.status().applications[APP_NAME].deployments["engine"].replica_states
    return {str(state): count for state, count in states.items() if count}
