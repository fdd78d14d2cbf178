"""Heads behind gRPC: one that is never right is let go, one behind TLS drafts as at home."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from draftline.actors.drafter_server import DrafterServer
from draftline.cluster.drafting.head_watch import NUM_DRAFTS
from draftline.cluster.drafting.hub import AnyDrafter, DrafterHub
from draftline.cluster.drafting.local_drafter import LocalDrafter
from draftline.cluster.links.access import TlsFiles
from draftline.cluster.links.grpc_link import GrpcLink, GrpcOptions
from draftline.core.proposals import FeatureLayers, FeatureRows, Proposal, Query, chain_proposal
from draftline.drafters.heads.drafter import load_head_drafter
from draftline.models.load.checkpoint import resolve_head_path
from draftline.models.load.model_info import read_model_info
from support.fakes.fake_drafters import FeatureReader
from support.servers.hub_session import LIMITS, HubSession, until
from support.servers.self_signed import self_signed_files

LAYERS = FeatureLayers((-1, 4), 16)
STEPS = 6


class StrangeHead(FeatureReader):
    """A head of another model: never right."""

    def __init__(self) -> None:
        super().__init__(LAYERS, "head")
        self.num_features = 0

    def observe_features(self, rows):
        super().observe_features(rows)
        self.num_features += len(rows)

    def propose_one(self, query: Query) -> Proposal:
        proposal = super().propose_one(query)
        return chain_proposal(self.name, (proposal.tokens + 7) % 50)


async def test_a_head_of_another_model_is_let_go_by_its_server_too(serve, caplog):
    head = StrangeHead()
    links = [GrpcLink("head", await serve(head), features=LAYERS)]
    hub = DrafterHub(links, LIMITS, origins={"head": "see HEAD and MODEL"})
    await hub.start()
    session = HubSession(hub)

    async def step() -> list[Proposal]:
        hub.note_features(
            [FeatureRows("r", len(session.text) - 1, np.ones((1, LAYERS.row_len), np.float32))]
        )
        return await session.step(1)

    with caplog.at_level(logging.WARNING):
        for _ in range(NUM_DRAFTS):
            assert await step()
        assert head.texts
        assert head.num_features > NUM_DRAFTS - 5
        assert not await step()
    assert [one.getMessage().split()[1] for one in caplog.records] == ["event=left_out"]
    [stats] = hub.stats()
    assert (stats.left_out, stats.connected, stats.errors) == (True, False, 0)
    num_features = head.num_features

    async def has_forgotten() -> bool:
        return not head.texts

    await until(has_forgotten)
    # It is neither called again nor sent anything.
    for _ in range(5):
        assert not await step()
    assert not head.texts
    assert head.num_features == num_features
    assert hub.stats()[0].messages == stats.messages
    await hub.stop()


async def test_a_head_behind_tls_drafts_as_one_of_this_process(tmp_path: Path):
    files = self_signed_files(tmp_path)
    target = read_model_info("demo")
    folder = resolve_head_path("demo-griffin")
    layers = load_head_drafter(folder, target).feature_layers
    server = DrafterServer(load_head_drafter(folder, target, "far"), "localhost", tls=files)
    address = f"localhost:{await server.start()}"
    drafters: dict[str, AnyDrafter] = {
        "near": LocalDrafter(load_head_drafter(folder, target, "far"), features=layers)
    }
    clients = {"tls": files, "no certificate": TlsFiles(ca=files.ca), "plain": None}
    for name, tls in clients.items():
        drafters[name] = GrpcLink("far", address, GrpcOptions(tls=tls), features=layers)
    drafts = {name: await drafts_of(drafter, layers) for name, drafter in drafters.items()}
    await server.stop()
    assert drafts["no certificate"] == drafts["plain"] == [()] * STEPS
    assert len(drafts["near"]) == STEPS
    assert all(drafts["near"])
    assert drafts["tls"] == drafts["near"]


async def drafts_of(drafter: AnyDrafter, layers: FeatureLayers) -> list[tuple[int, ...]]:
    """The tokens that a head drafts behind each token of a text, () where it does not."""
    hub = DrafterHub([drafter], replace(LIMITS, vocab_size=4096, answer_timeout_s=30.0))
    await hub.start()
    session, rng = HubSession(hub), np.random.default_rng(3)
    found = []
    for step in range(STEPS):
        # Of the prompt but its last token, and from then on of one token a step.
        first, count = (len(session.text) - 1, 1) if step else (0, len(session.text) - 1)
        # What 16 bits hold, as they travel.
        states = torch.from_numpy(rng.normal(size=(count, layers.row_len)).astype(np.float32))
        hub.note_features([FeatureRows("r", first, states.bfloat16().float().numpy())])
        proposals = await session.step(int(step > 0), budget_s=2.0)
        found.append(tuple(proposals[0].tokens.tolist()) if proposals else ())
    await hub.stop()
    return found
