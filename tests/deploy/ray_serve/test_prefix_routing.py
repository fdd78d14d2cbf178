"""Where requests go, over replicas that are names."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from draftline.core.kv_cache import PrefixKeys
from draftline.deploy.ray_serve.prefix_routing import PrefixRouting, Routed, SentPrefixes

BLOCK = 4
NAMES = ["one", "two", "three"]


def routing(*, max_blocks: int = 100, load_tokens: int = 10) -> PrefixRouting:
    return PrefixRouting(
        block_size=BLOCK,
        max_blocks=max_blocks,
        load_tokens=load_tokens,
        model_name="tiny",
        rng=random.Random(1),
    )


def request(tokens: Sequence[int], *, session: str = "", request_id: str = "a") -> Routed:
    keys = PrefixKeys("", BLOCK).upto(list(tokens), len(tokens))
    return Routed(request_id=request_id, keys=keys, num_tokens=len(tokens), session=session)


def loads(*counts: int) -> dict[str, int]:
    return dict(zip(NAMES, counts, strict=True))


def test_the_longest_prefix_wins() -> None:
    router = routing()
    router.routed(request(range(20)), "two", NAMES)
    router.routed(request([*range(8), *range(50, 70)]), "three", NAMES)
    assert router.rank(request(range(30), request_id="b"), loads(0, 0, 0)) == [
        "two",
        "three",
        "one",
    ]


def test_a_prefix_is_worth_waiting_for_as_long_as_computing_it_would_take() -> None:
    router = routing(load_tokens=10)
    router.routed(request(range(33)), "two", NAMES)
    again = request(range(33), request_id="b")
    # 32 tokens are there: three requests more cost less, four do not.
    assert router.rank(again, loads(0, 3, 0))[0] == "two"
    assert router.rank(again, loads(0, 4, 0))[0] != "two"


def test_without_a_prefix_the_least_loaded_takes_it() -> None:
    assert routing().rank(request(range(9)), loads(2, 1, 3)) == ["two", "one", "three"]
    assert routing().rank(Routed(request_id=""), loads(2, 1, 0))[0] == "three"


def test_equal_replicas_take_turns() -> None:
    router = routing()
    firsts = Counter(router.rank(request([n] * 9), loads(0, 0, 0))[0] for n in range(60))
    assert set(firsts) == set(NAMES)
    assert max(firsts.values()) < 40


def test_a_session_stays_whatever_the_others_do() -> None:
    router = routing()
    owners = {f"s{n}": router.rank(request([1] * 9, session=f"s{n}"), loads(0, 0, 0))[0]
              for n in range(60)}  # fmt: skip
    assert set(owners.values()) == set(NAMES)
    for session, owner in owners.items():
        busy = {name: 9 if name == owner else 0 for name in NAMES}
        assert router.rank(request([2] * 9, session=session), busy)[0] == owner
    # Another ingress knows nothing of this one, and agrees.
    other = routing()
    for session, owner in owners.items():
        assert other.rank(request([3] * 9, session=session), loads(0, 0, 0))[0] == owner
    # Where a replica goes, only its own sessions move.
    left = {name: 0 for name in NAMES if name != "two"}
    for session, owner in owners.items():
        if owner != "two":
            assert other.rank(request([3] * 9, session=session), left)[0] == owner


def test_among_equals_a_tenant_has_its_own() -> None:
    def first(tenant: str, *counts: int, seen_by: PrefixRouting) -> str:
        sent = Routed(request_id="a", num_tokens=9, tenant=tenant)
        return seen_by.rank(sent, loads(*counts))[0]

    one, other = routing(), routing()
    homes = {f"t{n}": first(f"t{n}", 1, 1, 1, seen_by=one) for n in range(60)}
    assert set(homes.values()) == set(NAMES)
    for tenant, home in homes.items():
        assert first(tenant, 0, 0, 0, seen_by=other) == home
        # It is not worth waiting for.
        busy = [int(name == home) for name in NAMES]
        assert first(tenant, *busy, seen_by=one) != home
    # Nor is it worth a prefix.
    prompt = request(range(20))
    one.routed(prompt, "two", NAMES)
    for tenant in homes:
        again = Routed(request_id="b", keys=prompt.keys, num_tokens=20, tenant=tenant)
        assert one.rank(again, loads(0, 0, 0))[0] == "two"


def test_what_lost_a_request_is_tried_last() -> None:
    router = routing()
    lost = request(range(20), session="s")
    first = router.rank(lost, loads(0, 0, 0))[0]
    router.routed(lost, first, NAMES)
    assert router.rank(lost, loads(0, 0, 0))[-1] == first
    assert router.rank(request(range(20), request_id="b"), loads(0, 0, 0))[0] == first


class Counts:
    """Why requests went where they went."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int, int]] = []

    def record_routed(self, reason: str, num_tokens: int, num_sent_before: int) -> None:
        self.told.append((reason, num_tokens, num_sent_before))


def test_reasons_and_tokens_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, router = Counts(), routing()
    monkeypatch.setattr(PrefixRouting, "counts", {"tiny": counts, "other": Counts()})
    router.routed(request(range(17)), "one", NAMES)
    router.routed(request(range(17), request_id="b"), "one", NAMES)
    own = router.rank(request([7] * 9, session="s"), loads(0, 0, 0))[0]
    router.routed(request([7] * 9, session="s"), own, NAMES)
    router.routed(Routed(request_id=""), own, NAMES)
    assert counts.told == [("load", 17, 0), ("prefix", 17, 16), ("session", 9, 0)]
    assert not PrefixRouting.counts["other"].told  # pyright: ignore[reportAttributeAccessIssue]


def test_replicas_that_go_are_forgotten_and_prefixes_from_their_end() -> None:
    sent = SentPrefixes(max_blocks=6)
    sent.note("one", [b"a", b"b", b"c"])
    sent.note("one", [b"x", b"y", b"z", b"w"])
    assert sent.num_blocks("one", [b"a", b"b", b"c"]) == 2
    assert sent.num_blocks("one", [b"x", b"y", b"z", b"w"]) == 4
    sent.keep(["two"])
    sent.keep(["one", "two"])
    assert sent.num_blocks("one", [b"a"]) == 0


def test_salts_share_nothing() -> None:
    router = routing()
    router.routed(request(range(20)), "one", NAMES)
    keys = PrefixKeys("other", BLOCK).upto(list(range(20)), 20)
    other = Routed(request_id="b", keys=keys, num_tokens=20)
    assert router.rank(other, loads(1, 0, 0))[-1] == "one"
