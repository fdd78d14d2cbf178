"""Servers of a pool as Ray Serve tells of them, by a handle that the test answers for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from draftline.core.errors import ConfigError
from ray.exceptions import ActorDiedError, ActorUnavailableError

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray Serve's own, when it is imported


class Handle:
    """Answers what the test has put in, or raises it."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.asked: list[str] = []

    def broadcast(self, method: str) -> Handle:
        self.asked.append(method)
        return self

    async def results_async(self, *, timeout_s: float, return_exceptions: bool) -> list[Any]:
        assert timeout_s > 0
        assert return_exceptions
        if self.answers == ["silence"]:
            raise TimeoutError
        return list(self.answers)


@pytest.fixture
def module() -> ModuleType:
    from draftline.actors import pool_members

    return pool_members


@pytest.fixture
def handle(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Handle:
    handle = Handle()
    given = {("drafter", "pool"): handle}
    monkeypatch.setattr(module.serve, "get_deployment_handle", lambda name, app: given[name, app])
    return handle


async def test_members_are_those_that_answer_and_links_are_made_of_what_they_say(
    module: ModuleType, handle: Handle
) -> None:
    made: list[Any] = []
    members = module.ServeMembers("pool", made.append)
    one = module.PoolMember("a", "10.0.0.1:7100", "token of a", 3)
    other = module.PoolMember("b", "10.0.0.2:7100", "token of b", 0)
    handle.answers = [one, ActorDiedError(), other]
    assert await members.find() == {"a": 3, "b": 0}
    members.link("b")
    assert made == [other]
    assert handle.asked == ["member"]
    assert "token of a" not in repr(one)
    handle.answers = [one]
    assert await members.find() == {"a": 3}


@pytest.mark.parametrize("answer", [ActorUnavailableError("busy", None), ValueError(), "silence"])
async def test_who_may_be_there_still_is_not_taken_for_gone(
    module: ModuleType, handle: Handle, answer: object
) -> None:
    members = module.ServeMembers("pool", lambda _member: None)
    handle.answers = [answer]
    with pytest.raises((ActorUnavailableError, ValueError, TimeoutError)):
        await members.find()


async def test_a_silent_server_holds_up_no_news_of_others(
    module: ModuleType, handle: Handle
) -> None:
    members = module.ServeMembers("pool", lambda _member: None)
    one, other = (module.PoolMember(key, f"10.0.0.1:{key}", "t", 0) for key in "12")
    handle.answers = [one]
    assert await members.find() == {"1": 0}
    handle.answers = [ActorUnavailableError("busy", None), other]
    assert await members.find() == {"1": 0, "2": 0}
    handle.answers = [other]
    assert await members.find() == {"2": 0}


def test_without_a_cluster_the_setting_is_named(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**options: Any) -> None:
        assert options["address"] == "auto"
        raise ConnectionError("no cluster")

    monkeypatch.setattr(module.ray, "init", refuse)
    monkeypatch.setattr(module.ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"^drafter_pool: there is no Ray cluster"):
        module.join_cluster()
