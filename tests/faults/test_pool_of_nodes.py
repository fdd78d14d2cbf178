"""A pool whose servers take TLS, on two nodes of a Ray cluster, of which one is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from draftline import DrafterConfig, Engine, EngineConfig, SamplingParams
from draftline.cluster.drafting.replies import DrafterStats
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts
from support.servers.drafter_pool import POOL, RAY_VARIABLES, serving_pool
from support.servers.ray_cluster import ray_nodes
from support.servers.self_signed import self_signed_files

PROMPTS = [prompt.text for prompt in held_out_prompts(6)]
PARAMS = SamplingParams(max_tokens=80, temperature=0.0, ignore_eos=True)
# That of the cluster's second node, as far as one machine can have two.
OTHER = "127.0.0.2"
TIMEOUT_S = 120.0


def engine_of(drafter: DrafterConfig) -> Engine:
    """One that asks in every step, of a token each, however quick the machine is."""
    return Engine(
        EngineConfig(
            model="demo",
            drafters=[drafter],
            node_budget="full",
            multi_step_ms=0,
            draft_deadline_ms=500,
        )
    )


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def stats(engine: Engine) -> DrafterStats:
    return engine.stats().drafters[0]


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_servers_on_two_nodes_take_tls_and_one_node_is_lost(tmp_path: Path) -> None:
    files = self_signed_files(tmp_path)
    tls = {"tls_ca": files.ca, "tls_certificate": files.certificate, "tls_key": files.key}
    pool = {
        "drafter": {"kind": "prompt_lookup", "name": "far", **tls},
        # Each node has room for one.
        "min_replicas": 2,
        "max_replicas": 2,
        "cpus_per_drafter": 0.8,
    }
    far = {"kind": "prompt_lookup", "name": "far", "transport": "grpc", "drafter_pool": POOL}
    known = DrafterConfig(**far, **tls, tls_server_name="localhost")
    quick = mock.patch.dict(os.environ, RAY_VARIABLES)
    with quick, ray_nodes([OTHER]) as nodes, serving_pool(**pool):
        # One that shows no certificate, and expects none, gets no drafts, and loses no text.
        with engine_of(DrafterConfig(**far)) as stranger:
            [answer] = stranger.generate(PROMPTS[:1], PARAMS)
            assert (stats(stranger).proposals, stats(stranger).servers) == (0, 0)
        with engine_of(known) as engine:
            plain = engine.generate(PROMPTS, PARAMS, RequestOptions(speculative=False))
            expected = [one.token_ids for one in plain]
            assert answer.token_ids == expected[0]
            until(lambda: stats(engine).servers == 2, "one of the two nodes has no server")
            assert [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == expected
            proposals = stats(engine).proposals
            assert proposals > 0
            nodes.lose(OTHER)
            until(lambda: stats(engine).servers == 1, "nobody misses the node")
            assert [one.token_ids for one in engine.generate(PROMPTS, PARAMS)] == expected
            assert stats(engine).proposals > proposals
