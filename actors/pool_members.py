"""Finds the drafter servers of a Ray Serve application (`MemberFinder`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.handle import DeploymentHandle

from ..cluster.links.link import DrafterLink
from ..cluster.loop_calls import in_daemon_thread
from ..core.errors import ConfigError

# The deployment of servers in a pool's application, and its method that returns a `PoolMember`.
SERVER_NAME = "drafter"
MEMBER_METHOD = "member"
# Timeout of a server's answer, which delays the answers of the others.
ANSWER_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class PoolMember:
    """The self-description of a drafter server of a pool.

    key       unique to this server; a replacement has another one
    address   host:port
    token     that calls must carry
    num_open  open requests, of all coordinators
    """

    key: str
    address: str
    token: str = field(repr=False)
    num_open: int


class ServeMembers:
    """The running servers of a pool's application, without those that Ray Serve is stopping.

    application  its name
    make_link    to one server
    """

    def __init__(self, application: str, make_link: Callable[[PoolMember], DrafterLink]) -> None:
        self._application = application
        self._make_link = make_link
        self._handle: DeploymentHandle[Any] | None = None
        self._members: dict[str, PoolMember] = {}

    async def find(self) -> Mapping[str, int]:
        """See `MemberFinder`. If a server does not answer, the known members are kept beside the
        ones that answer. If none answers, raises Ray's error, such as `TimeoutError`.
        """
        if self._handle is None:
            # This call waits for Ray Serve's controller.
            await in_daemon_thread(self._get_handle)
        assert self._handle is not None
        asking = self._handle.broadcast(MEMBER_METHOD)
        answers = await asking.results_async(timeout_s=ANSWER_TIMEOUT_S, return_exceptions=True)
        members = {one.key: one for one in answers if isinstance(one, PoolMember)}
        silent = [one for one in answers if not isinstance(one, (PoolMember, ActorDiedError))]
        if silent and not members:
            raise silent[0]
        if silent:
            members = self._members | members
        self._members = members
        return {key: member.num_open for key, member in members.items()}

    def link(self, key: str) -> DrafterLink:
        """See `MemberFinder`."""
        return self._make_link(self._members[key])

    def _get_handle(self) -> None:
        self._handle = serve.get_deployment_handle(SERVER_NAME, self._application)


def join_cluster() -> None:
    """Connect to the Ray cluster of this machine, if this process is in none yet.

    Raises `ConfigError`.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError as error:
        raise ConfigError(
            "drafter_pool", "there is no Ray cluster here to find it in: ray start"
        ) from error
