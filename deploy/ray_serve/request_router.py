"""Ray Serve's interface to `prefix_routing.py`: the engine deployment's request router.

Each ingress has one. It knows the prompts that its own ingress has sent, and the load that replicas
report with their answers.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from ...core.kv_cache import PrefixKeys
from ...core.request.sampling_params import RequestOptions
from .prefix_routing import PrefixRouting, Routed

# The namespace of requests that are no tenant's.
SHARED = RequestOptions().namespace


class PrefixRouter(RequestRouter):
    """Sends a request where most of its prompt was sent before, if that pays.

    Ray Serve copies this class into the processes of ingresses by its code, so that it has no state
    of a process.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """`block_size`, `max_blocks`, `load_tokens` and `model_name`, as of `PrefixRouting`."""
        self._block_size = kwargs["block_size"]
        self._routing = PrefixRouting(
            block_size=self._block_size,
            max_blocks=kwargs["max_blocks"],
            load_tokens=kwargs["load_tokens"],
            model_name=kwargs["model_name"],
            rng=random.Random(),
        )
        # The replicas of this process's requests.
        self._ours: dict[str, ReplicaID] = {}
        self._num_ours: Counter[ReplicaID] = Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas came or went."""
        super().update_replicas(replicas)
        self._routing.keep(replica.replica_id.unique_id for replica in replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The candidates, the best first; Ray Serve takes the first that has room."""
        if pending_request is not None:
            # There is no better choice: what has no room is asked again after a while.
            pending_request.routing_context.should_backoff = True
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self._load(replica.replica_id) for name, replica in by_name.items()}
        request = self._routed(pending_request)
        return [[by_name[name]] for name in self._routing.rank(request, loads)]

    def on_request_routed(
        self,
        pending_request: PendingRequest,
        replica_id: ReplicaID,
        result: Any,  # noqa: ARG002 - the interface
    ) -> None:
        """A replica has taken a request."""
        self._ours[pending_request.metadata.internal_request_id] = replica_id
        self._num_ours[replica_id] += 1
        names = [known.unique_id for known in self.curr_replicas]
        self._routing.routed(self._routed(pending_request), replica_id.unique_id, names)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request has left its replica, or was refused there."""
        if self._ours.pop(internal_request_id, None) is not None:
            self._num_ours[replica_id] -= 1
            # Replicas come and go.
            if not self._num_ours[replica_id]:
                del self._num_ours[replica_id]

    def _load(self, replica_id: ReplicaID) -> int:
        """Requests at a replica: ours, or as many as it reported, if these are more."""
        reported = self.replica_queue_len_cache.get(replica_id) or 0
        return max(reported, self._num_ours[replica_id])

    def _routed(self, pending: PendingRequest | None) -> Routed:
        """What a call of `EngineReplica.stream` holds; other calls have no prompt."""
        match None if pending is None else pending.args:
            case [tuple(prompt), _, RequestOptions() as options, str(request_id), *_]:
                keys = PrefixKeys(options.salt, self._block_size)
                return Routed(
                    request_id=request_id,
                    keys=keys.upto(prompt, len(prompt)),
                    num_tokens=len(prompt),
                    session=options.session,
                    tenant="" if options.namespace == SHARED else options.namespace,
                )
        return Routed(request_id="")
