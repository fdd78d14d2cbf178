"""What a target over some stages takes, what it has room for, and what speculation brings.

Times are those of a cost profile: what a pass reads, and what it computes. Nothing runs; `draftline
bench --cost-profile` lets a real engine run at the times of such a profile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .cost_profile import CostProfile, Device, Network, products_s
from .devices import GIB

# Beside what is read and computed: of each stage, as bundled profiles assume it; of the host's work
# for a step, so that 8B on one H100 takes the 6.3 ms a token that SGLang's documentation has; of a
# message between two processes, beside the link's own time
# (`benchmarks/results/stage_transport.json`, a step of one stage).
PASS_S, HOST_S, MESSAGE_S = 0.3e-3, 0.7e-3, 0.3e-3
# What a GPU's memory holds beside weights and KV: libraries, graphs, a step's activations.
WORK_BYTES = 2 * GIB
# Nodes of a chain of drafts that are tried for the best.
NODES = (1, 2, 3, 4, 6, 8, 12, 16)
# Copies of texts that were read or answered take no time of a model.
COPIES, HEAD = "copies", "head"
# A server of a pool is busy for so much of the time.
POOL_UTILIZATION = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSize:
    """A target as far as its size matters.

    weights      all of them; embeddings: of these, those of which a row reads one entry
    value_bytes  of a weight, and of a key's or value's number
    """

    name: str
    weights: float
    embeddings: float
    layers: int
    hidden_size: int
    kv_size: int
    vocab_size: int
    value_bytes: float

    @property
    def weight_bytes(self) -> float:
        """Memory of the weights of all stages."""
        return self.weights * self.value_bytes

    @property
    def kv_bytes(self) -> float:
        """Of one token of the text, over all stages."""
        return 2.0 * self.layers * self.kv_size * self.value_bytes

    def network(self, num_stages: int) -> Network:
        """What a pass through all stages reads and computes."""
        read = self.weights - self.embeddings
        return Network(
            bytes=read * self.value_bytes,
            operations=2.0 * read,
            kv_bytes=self.kv_bytes,
            # A query's product with a key, and a weight's with a value.
            attention_operations=4.0 * self.layers * self.hidden_size,
            pass_s=PASS_S + HOST_S / num_stages,
        )

    @property
    def head(self) -> Network:
        """A head of one layer with the target's output matrix over all its words."""
        size = self.hidden_size
        layer = (self.weights - 2.0 * self.vocab_size * size) / self.layers
        weights = max(layer, 0.0) + 2.0 * size * size + self.vocab_size * size
        return Network(
            bytes=weights * self.value_bytes, operations=2.0 * weights, pass_s=PASS_S / 2
        )


@dataclass(frozen=True, slots=True)
class Link:
    """Between two stages: seconds of a small message one way, and bytes a second."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Gain:
    """What speculation brings: nodes for each request, and tokens a second over plain decoding."""

    nodes: int
    factor: float


def profile_of(target: TargetSize, device: Device, num_stages: int, link: Link) -> CostProfile:
    """The cost profile of a target over stages on such devices."""
    return CostProfile(
        name=f"{target.name} over {num_stages}",
        num_stages=num_stages,
        device=device,
        target=target.network(num_stages),
        hop_s=link.latency_s + MESSAGE_S,
        row_bytes=target.hidden_size * target.value_bytes,
        link=link.bandwidth,
        drafters={HEAD: target.head},
        sources={"all": "draftline doctor"},
    )


def round_s(profile: CostProfile, requests: int, nodes: int, context: int) -> float:
    """Seconds in which every request gets its next tokens.

    Requests are spread over as many steps in flight as there are stages, so that each step holds
    its share of them, and passes every stage once.
    """
    share = math.ceil(requests / min(requests, profile.num_stages))
    num_rows = share * (nodes + 1)
    return profile.num_stages * profile.stage_s(num_rows, share * context, num_rows * context)


def tokens_a_round(nodes: int, acceptance: float) -> float:
    """Expected tokens of a request with a chain of drafts, of which each is right with this
    probability if those before it are; the target's own token included.
    """
    return sum(acceptance**depth for depth in range(nodes + 1))


def plain_rate(profile: CostProfile, requests: int, context: int) -> float:
    """Tokens a second of all requests together, without drafts."""
    return requests / round_s(profile, requests, 0, context)


def best_gain(
    profile: CostProfile, requests: int, context: int, acceptance: float, source: str = COPIES
) -> Gain:
    """The number of nodes that brings most. Drafts are waited for, as those of heads are."""
    plain = round_s(profile, requests, 0, context)
    best = Gain(0, 1.0)
    share = math.ceil(requests / min(requests, profile.num_stages))
    for nodes in NODES:
        seconds = round_s(profile, requests, nodes, context)
        if source != COPIES:
            seconds += profile.draft_s(source, nodes, share)
        factor = tokens_a_round(nodes, acceptance) * plain / seconds
        if factor > best.factor:
            best = Gain(nodes, factor)
    return best


def kv_room(target: TargetSize, num_stages: int, memory: float, utilization: float = 0.9) -> int:
    """Tokens of all requests together whose keys and values fit; 0: not even the weights do.

    memory  bytes of a stage's device
    """
    left = utilization * memory - WORK_BYTES - target.weight_bytes / num_stages
    return max(0, int(left * num_stages / target.kv_bytes))


def fewest_stages(
    target: TargetSize, memory: float, tokens: int, choices: Sequence[int]
) -> int | None:
    """The fewest stages that have room for these tokens; None: none of `choices` has."""
    fits = (count for count in choices if kv_room(target, count, memory) >= tokens)
    return next(fits, None)


def pool_servers(
    requests: int, drafter: Network, device: Device, nodes: int, every_s: float
) -> int | None:
    """Servers of a pool that draft `nodes` levels for all requests within a round of the target.

    Requests of one server are drafted for together; a server is busy for `POOL_UTILIZATION`. None:
    the drafter is too slow for one request.
    """
    for servers in range(1, requests + 1):
        rows = math.ceil(requests / servers)
        if (
            nodes * (products_s(device, drafter, rows) + drafter.pass_s)
            <= POOL_UTILIZATION * every_s
        ):
            return servers
    return None
