"""Two engines share a pool on Ray Serve that grows, loses a server, and shrinks under them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from draftline import Engine, EngineConfig, SamplingParams
from draftline.cluster.drafting.replies import DrafterStats
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts
from support.servers.drafter_pool import DRAFTER, drafter_pool, pool_pids

PROMPTS = [prompt.text for prompt in held_out_prompts(4)]
PARAMS = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True)
# It is asked in every step, and plain steps take a token, however quick the machine is.
CONFIG = EngineConfig(
    model="demo", drafters=[DRAFTER], node_budget="full", multi_step_ms=0, draft_deadline_ms=200
)
TIMEOUT_S = 240.0


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    pool = drafter_pool(max_replicas=2, target_open_requests=3)
    with pool, Engine(CONFIG) as one, Engine(CONFIG) as other:
        yield [one, other]


def stats(engine: Engine) -> DrafterStats:
    return engine.stats().drafters[0]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


@contextmanager
def generating(engines: Sequence[Engine], num_prompts: int) -> Iterator[list[tuple[int, ...]]]:
    """All texts that the engines write, each the same prompts again and again."""
    is_over = threading.Event()
    texts: list[tuple[int, ...]] = []

    def generate(engine: Engine) -> None:
        while not is_over.is_set():
            texts.extend(one.token_ids for one in engine.generate(PROMPTS[:num_prompts], PARAMS))

    threads = [threading.Thread(target=generate, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    try:
        yield texts
    finally:
        is_over.set()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a request is lost"


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_pool_grows_loses_a_server_and_shrinks_and_texts_stay(engines: list[Engine]) -> None:
    plain = engines[0].generate(PROMPTS, PARAMS, RequestOptions(speculative=False))
    expected = {one.token_ids for one in plain}
    assert [stats(engine).servers for engine in engines] == [1, 1]
    with generating(engines, len(PROMPTS)) as texts:
        until(lambda: all(stats(one).servers == 2 for one in engines), "it does not grow")
        assert stats(engines[0]).errors == 0
        before = pool_pids()
        # Whichever of them has requests now.
        moved = [stats(engine).moved for engine in engines]
        os.kill(before[0], signal.SIGKILL)
        until(lambda: all(stats(one).servers == 1 for one in engines), "nobody misses it")
        until(lambda: all(stats(one).servers == 2 for one in engines), "it is not replaced")
        assert before[0] not in pool_pids()
        assert [stats(engine).moved for engine in engines] != moved
        until(lambda: len(texts) > 8, "no text ends")
    assert set(texts) == expected
    proposals = [stats(engine).proposals for engine in engines]
    with generating(engines, 1) as texts:
        until(lambda: all(stats(one).servers == 1 for one in engines), "it does not shrink")
        until(lambda: len(pool_pids()) == 1, "the server that drains does not end")
        until(lambda: len(texts) > 4, "no text ends")
    assert set(texts) == {plain[0].token_ids}
    assert all(stats(one).proposals > told for one, told in zip(engines, proposals, strict=True))
