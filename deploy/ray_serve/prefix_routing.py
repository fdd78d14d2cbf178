"""Which replica a request should go to: by what it was sent before, its session, its load.

Without Ray, whose interface `request_router.py` implements.
"""

from __future__ import annotations

import hashlib
import random
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from ..api.http.metrics import ServerMetrics

# Requests whose earlier tries are remembered.
MAX_TRIED = 4096

# session  the replica of its session
# prefix   one that was sent the beginning of its prompt before
# load     the one that has least to do
Reason = Literal["session", "prefix", "load"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """A request, as the router sees it.

    request_id  the same at each of its tries
    keys        of the full blocks of its prompt (`core/request/request.py`)
    num_tokens  of the prompt
    session     requests of one session go to one replica; empty: it has none
    tenant      whose drafts come of its own texts; empty: anybody's
    """

    request_id: str
    keys: Sequence[bytes] = ()
    num_tokens: int = 0
    session: str = ""
    tenant: str = ""


class SentPrefixes:
    """Keys of the blocks that each replica was sent, as many as its cache may hold.

    max_blocks  of one replica
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._sent: dict[str, OrderedDict[bytes, None]] = {}

    def keep(self, replicas: Iterable[str]) -> None:
        """Drop all other replicas."""
        self._sent = {name: self._sent.get(name, OrderedDict()) for name in replicas}

    def note(self, replica: str, keys: Sequence[bytes]) -> None:
        """A replica is sent a prompt with these blocks."""
        sent = self._sent.setdefault(replica, OrderedDict())
        # The last first, so that a prefix is forgotten from its end.
        for key in reversed(keys):
            sent[key] = None
            sent.move_to_end(key)
        while len(sent) > self._max_blocks:
            sent.popitem(last=False)

    def num_blocks(self, replica: str, keys: Sequence[bytes]) -> int:
        """How many of the first blocks it was sent before."""
        sent = self._sent.get(replica, {})
        for count, key in enumerate(keys):
            if key not in sent:
                return count
        return len(keys)


class PrefixRouting:
    """Ranks replicas for requests. One event loop uses it.

    block_size   tokens of a block
    load_tokens  prompt tokens whose computing costs as much as one more request beside
    model_name   whose requests they are
    counts       of this process's requests, by model; Ray Serve makes the routers
    """

    counts: ClassVar[dict[str, ServerMetrics]] = {}

    def __init__(
        self,
        *,
        block_size: int,
        max_blocks: int,
        load_tokens: int,
        model_name: str,
        rng: random.Random,
    ) -> None:
        self._model_name = model_name
        self._block_size = block_size
        self._load_tokens = load_tokens
        self._rng = rng
        self._sent = SentPrefixes(max_blocks)
        self._tried: OrderedDict[str, list[str]] = OrderedDict()

    def keep(self, replicas: Iterable[str]) -> None:
        """Drop all other replicas."""
        self._sent.keep(replicas)

    def rank(self, request: Routed, loads: Mapping[str, int]) -> list[str]:
        """Replicas, the best first, of those whose number of requests is in `loads`.

        A session's own is the first, as long as there is it. Among equal ones that is a tenant's
        own, whose drafters have seen most of the tenant's texts. Those that the request was sent to
        before, and that lost it, are the last.
        """
        names = list(loads)
        self._rng.shuffle(names)
        costs = {name: self._cost(request, name, loads[name]) for name in names}
        home = _own_replica(request.tenant, names) if request.tenant else None
        names.sort(key=lambda name: (costs[name], loads[name], name != home))
        if request.session:
            own = _own_replica(request.session, names)
            names.sort(key=lambda name: name != own)
        tried = self._tried.get(request.request_id, ())
        return sorted(names, key=lambda name: name in tried)

    def routed(self, request: Routed, replica: str, replicas: Iterable[str]) -> None:
        """The request goes to one of the replicas."""
        count = self._num_sent(request, replica)
        self._sent.note(replica, request.keys)
        self._note_try(request.request_id, replica)
        counts = self.counts.get(self._model_name)
        if counts is None or not request.num_tokens:
            return
        is_own = request.session and replica == _own_replica(request.session, replicas)
        reason = "session" if is_own else "prefix" if count else "load"
        counts.record_routed(reason, request.num_tokens, count * self._block_size)

    def _cost(self, request: Routed, replica: str, load: int) -> int:
        """The cost of the request there, in prompt tokens."""
        num_sent = self._num_sent(request, replica) * self._block_size
        return request.num_tokens - num_sent + load * self._load_tokens

    def _num_sent(self, request: Routed, replica: str) -> int:
        """Blocks of its prompt that a replica was sent before, without the one of the last token,
        which is computed whatever is cached."""
        most = (request.num_tokens - 1) // self._block_size
        return self._sent.num_blocks(replica, request.keys[:most])

    def _note_try(self, request_id: str, replica: str) -> None:
        if not request_id:
            return
        self._tried.setdefault(request_id, []).append(replica)
        self._tried.move_to_end(request_id)
        if len(self._tried) > MAX_TRIED:
            self._tried.popitem(last=False)


def _own_replica(owner: str, replicas: Iterable[str]) -> str | None:
    """The one of highest hash with a session or tenant: another only where it comes or goes.

    Every ingress finds the same one (rendezvous hashing; Thaler and Ravishankar, 1998).
    """
    return max(replicas, key=lambda name: _hash(owner, name), default=None)


def _hash(owner: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{replica}\0{owner}".encode(), digest_size=8).digest()
