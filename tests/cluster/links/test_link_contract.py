"""What holds for a drafter whether it runs in process or behind gRPC."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import NoReturn

import numpy as np
import pytest
from draftline.cluster.links.link import REPORT_EVERY
from draftline.core.errors import ProtocolError
from draftline.core.proposals import (
    MAX_ASSUMED_TOKENS,
    MAX_PROPOSAL_NODES,
    MAX_TOP_NEXT_TOKENS,
    DraftRequest,
    FeatureLayers,
    FeatureRows,
    LogitsParams,
    Probe,
    Proposal,
    Query,
    TopNextTokens,
    chain_proposal,
    empty_proposal,
)
from support.fakes.fake_drafters import (
    VOCAB_SIZE,
    CountingDrafter,
    FeatureReader,
    ProbingDrafter,
    ScriptedDrafter,
    following,
)
from support.servers.hub_session import HubSession, until


async def test_proposals_follow_the_text(make_hub):
    hub = await make_hub(CountingDrafter())
    session = HubSession(hub)
    for count in (0, 1, 3, 2, 7):
        (proposal,) = await session.step(count)
        assert proposal.source == "counting"
        assert proposal.tokens.tolist() == session.expected(4)
    (stats,) = hub.stats()
    assert (stats.proposals, stats.errors, stats.late) == (5, 0, 0)
    assert stats.latency_count == 5


async def test_requests_do_not_mix(make_hub):
    hub = await make_hub(CountingDrafter())
    sessions = [HubSession(hub, f"r{index}", 3 + index) for index in range(4)]
    for _ in range(3):
        commits = [session.commit(1 + index) for index, session in enumerate(sessions)]
        found = await hub.exchange(commits, [session.query() for session in sessions], budget_s=5.0)
        for session in sessions:
            (proposal,) = found[session.request_id]
            assert proposal.tokens.tolist() == session.expected(4)


async def test_the_drafter_learns_all_of_a_request(make_hub):
    drafter = CountingDrafter()
    hub = await make_hub(drafter)
    prompt = np.array([4, 5], dtype=np.int32)
    logits_params = LogitsParams(
        top_k=7, top_p=0.9, min_p=0.1, typical_p=0.8,
        repetition_penalty=1.1, presence_penalty=-0.3, frequency_penalty=0.2,
        logit_bias={3: 1.5, 70_000: -100.0}, allowed_token_ids=(1, 2, 3), banned_token_ids=(2,),
        min_tokens=5,
    )  # fmt: skip
    hub.open(
        DraftRequest("r", prompt, 2, 0.7, 2**62 + 1, "tenant", logits_params, (9, 1), "salt", False)
    )
    await hub.exchange([], [Query("r", 2, 4)], budget_s=5.0)
    (opened,) = drafter.opened
    assert opened.token_ids.tolist() == [4, 5]
    given = (opened.prompt_len, opened.temperature, opened.seed, opened.namespace)
    assert given == (2, 0.7, 2**62 + 1, "tenant")
    assert (opened.logits_params, opened.end_ids, opened.cache_salt) == (
        logits_params,
        (9, 1),
        "salt",
    )
    assert not opened.store


async def test_a_path_travels(make_hub):
    asked: dict[str, tuple[int, ...] | None] = {}

    def script(query: Query) -> object:
        asked[query.request_id.split("/")[-1]] = query.assumed
        last = query.assumed[-1] if query.assumed else query.committed_len - 1
        return chain_proposal("scripted", following(last, 3))

    hub = await make_hub(ScriptedDrafter(script))
    paths = {"none": None, "r": (7, 3), "empty": ()}
    sessions = {name: HubSession(hub, name) for name in paths}
    queries = [sessions[name].query()._replace(assumed=path) for name, path in paths.items()]
    found = await hub.exchange([], queries, budget_s=5.0)
    assert asked == paths
    assert [found[name][0].tokens.tolist() for name in paths] == [[5, 6, 7], [4, 5, 6], [5, 6, 7]]
    # One that is too long for any message costs that request's drafts, and nothing else.
    queries[1] = queries[1]._replace(assumed=(1,) * (MAX_ASSUMED_TOKENS + 1))
    found = await hub.exchange([], queries, budget_s=5.0)
    assert [len(found[name]) for name in paths] == [1, 0, 1]
    assert hub.stats()[0].errors == 0


async def test_a_probe_and_its_answer_travel(make_hub):
    drafter = ProbingDrafter()
    hub = await make_hub(drafter)
    session = HubSession(hub)
    (proposal,) = await session.step()
    assert proposal.probe is not None
    assert proposal.probe.mask.tolist() == [[True, False], [True, True]]
    answer = np.array([[3, 1]], dtype=np.int32)
    commit = session.commit(2, {"counting": answer, "another": answer + 1})
    await hub.exchange([commit], [session.query()], budget_s=5.0)
    await session.step(1)
    assert [c.probe_ids is None for c in drafter.commits] == [False, True]
    assert np.array_equal(drafter.commits[0].probe_ids, answer)


async def test_a_wish_for_top_next_tokens_and_its_answer_travel(make_hub):
    wish = dataclasses.replace(empty_proposal("scripted"), num_top_next_tokens=2)
    drafter = ScriptedDrafter(lambda _: wish)
    hub = await make_hub(drafter)
    session = HubSession(hub)
    (proposal,) = await session.step()
    assert (len(proposal.tokens), proposal.num_top_next_tokens) == (0, 2)
    tokens, ids = np.array([4], dtype=np.int32), np.array([[7, 5]], dtype=np.int32)
    heard = {"scripted": TopNextTokens(tokens, ids), "another": TopNextTokens(tokens, ids + 1)}
    commit = session.commit(1)._replace(top_next_tokens=heard)
    await hub.exchange([commit], [session.query()], budget_s=5.0)
    await session.step(1)
    (first, second) = drafter.commits
    assert first.top_next_tokens.tokens.tolist() == [4]
    assert first.top_next_tokens.ids.tolist() == [[7, 5]]
    assert second.top_next_tokens is None


GIVEN = FeatureLayers((-1, 2, 5, 7), 3)


def _features(first: int, count: int) -> tuple[FeatureRows, np.ndarray]:
    """What is handed out of `count` tokens, and the same as [count, layers, width].

    Of small whole numbers, which 16 bits hold as they are.
    """
    numbers = (first * GIVEN.row_len + np.arange(count * GIVEN.row_len)) % 250
    values = numbers.reshape(count, GIVEN.row_len).astype(np.float32)
    return FeatureRows("r", first, values), values.reshape(count, len(GIVEN.layers), GIVEN.width)


@pytest.mark.parametrize(("layers", "places"), [((-1, 2, 5, 7), [0, 1, 2, 3]), ((7, 2), [3, 1])])
async def test_features_of_its_layers_reach_a_drafter_that_reads_them(make_hub, layers, places):
    drafter = FeatureReader(FeatureLayers(layers, GIVEN.width))
    hub = await make_hub(drafter, GIVEN)
    assert hub.feature_drafters == {"reading"}
    session = HubSession(hub)
    handed_out = []
    for first, count in ((0, 4), (4, 1), (5, 3)):
        rows, values = _features(first, count)
        handed_out.append((first, values[:, places].reshape(count, -1)))
        hub.note_features([rows, rows._replace(request_id="unknown")])
        (proposal,) = await session.step(count if first else 0)
        assert proposal.tokens.tolist() == session.expected(4)
    (read,) = drafter.features.values()
    assert [rows.position for rows in read] == [first for first, _ in handed_out]
    for rows, (_, values) in zip(read, handed_out, strict=True):
        assert rows.values.dtype == np.float32
        assert np.array_equal(rows.values, values)


async def test_a_drafter_that_reads_none_is_sent_none(make_hub):
    hub = await make_hub(CountingDrafter())
    assert hub.feature_drafters == set()
    session = HubSession(hub)
    hub.note_features([_features(0, 4)[0]])
    (proposal,) = await session.step(1)
    assert proposal.tokens.tolist() == session.expected(4)


async def test_features_of_a_request_that_is_opened_again_are_its_own(make_hub):
    drafter = FeatureReader(GIVEN)
    hub = await make_hub(drafter, GIVEN)
    session = HubSession(hub)
    hub.note_features([_features(0, 4)[0]])
    hub.close("r")
    session = HubSession(hub)
    hub.note_features([_features(2, 1)[0]])
    assert await session.step()
    # Of a pool, it may be another server that reads them, under a name of its own.
    read = [rows.position for own in drafter.features.values() for rows in own]
    assert read == [2]


async def test_max_nodes_cuts(make_hub):
    hub = await make_hub(ScriptedDrafter(lambda _: chain_proposal("scripted", following(0, 9))))
    session = HubSession(hub)
    (proposal,) = await session.step(max_nodes=3)
    assert proposal.tokens.tolist() == [1, 2, 3]


async def test_what_a_cut_proposal_asked_for_is_kept(make_hub):
    asking = dataclasses.replace(chain_proposal("scripted", following(0, 9)), num_top_next_tokens=4)
    hub = await make_hub(ScriptedDrafter(lambda _: asking))
    (proposal,) = await HubSession(hub).step(max_nodes=3)
    assert (proposal.tokens.tolist(), proposal.num_top_next_tokens) == ([1, 2, 3], 4)


class ClosingDrafter(CountingDrafter):
    """Learns every request that ends, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self.learning_counts = {"learned": 0}
        self.is_told = asyncio.Event()
        self.ended: list[int] | None = None
        self._loop = asyncio.get_running_loop()

    def close(self, request_id: str) -> None:
        self.ended = self.texts.get(request_id)
        super().close(request_id)
        self.learning_counts = {"learned": self.learning_counts["learned"] + 1}
        self._loop.call_soon_threadsafe(self.is_told.set)

    def open(self, request: DraftRequest) -> None:
        super().open(request)
        self.is_told.clear()


async def test_the_end_of_the_last_request_needs_no_further_step(make_hub):
    drafter = ClosingDrafter()
    hub = await make_hub(drafter)
    sessions = [HubSession(hub, name) for name in ("one", "two")]
    for session in sessions:
        await session.step(2)
    for session in sessions:
        hub.close(session.request_id)
    async with asyncio.timeout(30):
        while drafter.texts:
            await drafter.is_told.wait()
            drafter.is_told.clear()
    assert drafter.learning_counts == {"learned": 2}


async def test_the_last_tokens_come_before_the_end(make_hub):
    """Those that the hub was told with it, and those that waited for a busy drafter."""
    drafter = ClosingDrafter()
    hub = await make_hub(drafter)
    session = HubSession(hub)
    await session.step(1)
    await hub.exchange([session.commit(2)], [], budget_s=0.0)
    hub.close("r", [session.commit(3)])
    async with asyncio.timeout(30):
        await drafter.is_told.wait()
    assert drafter.ended == session.text


async def test_what_is_learned_is_told(make_hub):
    drafter = ClosingDrafter()
    hub = await make_hub(drafter)
    session = HubSession(hub)
    for _ in range(REPORT_EVERY + 1):
        await session.step(1)
    assert hub.stats()[0].learning == {"learned": 0}
    hub.close("r")
    session = HubSession(hub, "again")
    for _ in range(REPORT_EVERY + 1):
        await session.step(1)
    assert hub.stats()[0].learning == {"learned": 1}


async def test_a_drafter_that_never_learns_tells_nothing(make_hub):
    hub = await make_hub(CountingDrafter())
    await HubSession(hub).step(1)
    assert hub.stats()[0].learning == {}


async def test_close_frees_and_an_id_can_be_used_again(make_hub):
    drafter = CountingDrafter()
    hub = await make_hub(drafter)
    first = HubSession(hub)
    await first.step(2)
    hub.close("r")
    hub.close("unknown")
    assert await hub.exchange([], [first.query()], budget_s=1.0) == {"r": []}
    again = HubSession(hub, prompt_len=9)
    (proposal,) = await again.step(1)
    assert proposal.tokens.tolist() == again.expected(4)
    assert len(drafter.texts) == 1


async def test_commits_that_came_too_late_are_ignored(make_hub):
    hub = await make_hub(CountingDrafter())
    session = HubSession(hub)
    stale = session.commit(2)
    hub.open(DraftRequest("r", np.array(session.text, dtype=np.int32), 5, 0.0, 1))
    (proposal,) = (await hub.exchange([stale], [session.query()], budget_s=5.0))["r"]
    assert proposal.tokens.tolist() == session.expected(4)
    hub.close("r")
    await hub.exchange([session.commit(1)], [], budget_s=5.0)
    assert hub.stats()[0].errors == 0


def _proposal(tokens, parents=None, log_probs=None, **changes) -> Proposal:
    count = len(tokens)
    parents = range(-1, count - 1) if parents is None else parents
    proposal = Proposal(
        "scripted",
        np.array(tokens, dtype=np.int32),
        np.array(parents, dtype=np.int32),
        np.zeros(count, np.float32) if log_probs is None else np.array(log_probs, np.float32),
    )
    return dataclasses.replace(proposal, **changes)


def _probe(**changes) -> Probe:
    rows = np.array([1, 2], dtype=np.int32)
    probe = Probe(rows, rows, np.tri(2, dtype=np.bool_), np.array([1], dtype=np.int32), 2)
    return dataclasses.replace(probe, **changes)


BAD_PROPOSALS = {
    "token above the vocabulary": _proposal([VOCAB_SIZE]),
    "negative token": _proposal([-1]),
    "parent after child": _proposal([1, 2], parents=[1, -1]),
    "parent is itself": _proposal([1], parents=[0]),
    "parent below root": _proposal([1], parents=[-2]),
    "smallest parent": _proposal([1], parents=[-(2**31)]),
    "shapes differ": _proposal([1, 2], parents=[-1]),
    "two dimensions": dataclasses.replace(_proposal([1]), tokens=np.ones((1, 1), dtype=np.int32)),
    "probability above one": _proposal([1], log_probs=[0.5]),
    "not a number": _proposal([1, 2], log_probs=[0.0, np.nan]),
    "probe token": _proposal([1], probe=_probe(tokens=np.array([1, VOCAB_SIZE], dtype=np.int32))),
    "probe offset": _proposal([1], probe=_probe(offsets=np.array([0, 1], dtype=np.int32))),
    "probe wanted": _proposal([1], probe=_probe(wanted=np.array([2], dtype=np.int32))),
    "probe mask": _proposal([1], probe=_probe(mask=np.ones((1, 2), dtype=np.bool_))),
    "probe top_k": _proposal([1], probe=_probe(top_k=0)),
    "too many top next tokens": _proposal([1], num_top_next_tokens=MAX_TOP_NEXT_TOKENS + 1),
    "more top next tokens than tokens": _proposal([1], num_top_next_tokens=VOCAB_SIZE + 1),
    "fewer than no top next tokens": _proposal([1], num_top_next_tokens=-1),
    "half a successor": _proposal([1], num_top_next_tokens=0.5),
    "too many nodes": _proposal([1] * (MAX_PROPOSAL_NODES + 1)),
    "None": None,
    "a number": 7,
    "lists": Proposal("scripted", [1], [-1], [0.0]),  # pyright: ignore[reportArgumentType]
}


class Unread(np.ndarray):
    """Fails the test that reads a number of it."""

    def tolist(self) -> NoReturn:
        raise AssertionError("read before its length was checked")

    def __getitem__(self, _index: object) -> NoReturn:
        raise AssertionError("read before its length was checked")


def test_a_proposal_of_millions_of_nodes_is_refused_by_its_length():
    tokens = np.ones(10_000_000, dtype=np.int32).view(Unread)
    proposal = Proposal("scripted", tokens, tokens, np.zeros(10_000_000, np.float32).view(Unread))
    with pytest.raises(ProtocolError, match=f"10000000 nodes; at most {MAX_PROPOSAL_NODES}"):
        proposal.check(VOCAB_SIZE)
    probe = Probe(tokens, tokens, np.ones((1, 1), dtype=np.bool_), tokens, 1)
    with pytest.raises(ProtocolError, match="too many rows"):
        probe.check(VOCAB_SIZE, 64)


@pytest.mark.parametrize("bad", BAD_PROPOSALS.values(), ids=BAD_PROPOSALS.keys())
async def test_a_bad_proposal_is_dropped_and_the_drafter_gets_another_chance(make_hub, bad):
    answers = iter([bad])

    def script(query: Query) -> object:
        # The text counts up from 0.
        return next(answers, chain_proposal("scripted", following(query.committed_len - 1, 3)))

    hub = await make_hub(ScriptedDrafter(script))
    session = HubSession(hub)
    assert await session.step() == []
    assert hub.stats()[0].errors == 1
    found: list[Proposal] = []
    for _ in range(50):
        if found := await session.step(1):
            break
        await hub.start()
    # Over gRPC it may be the answer to the step before, re-rooted.
    assert found[0].tokens.tolist() == session.expected(3)[: len(found[0].tokens)]
    assert hub.stats()[0].errors == 1


@pytest.mark.parametrize("method", ["open", "observe", "propose", "close"])
async def test_what_a_drafter_raises_stays_inside(make_hub, method, monkeypatch):
    drafter = CountingDrafter()
    hub = await make_hub(drafter)

    def fail(*_args: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(drafter, method, fail)
    session = HubSession(hub)
    for _ in range(4):
        await session.step(1)
    hub.close("r")
    other = HubSession(hub, "other")

    async def has_failed() -> bool:
        # Of a pool, the server that does may be another one than is asked.
        await other.step(1)
        return hub.stats()[0].errors >= 1

    await until(has_failed)


async def test_too_few_proposals(make_hub, monkeypatch):
    drafter = CountingDrafter()
    monkeypatch.setattr(drafter, "propose", lambda *_: [])
    hub = await make_hub(drafter)
    assert await HubSession(hub).step() == []
    assert hub.stats()[0].errors == 1
