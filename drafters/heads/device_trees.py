"""Trees that a feature head grows on a GPU: all levels of several requests in one captured graph.

`TreeGrowth` looks at every level on the host: on a GPU most of its time are launches and waits.
Here shapes are fixed. The device itself takes the candidates of a level, ranks them with the
requests' noise, and chooses the nodes that go on, as `drafters/model/` does it on the host:
`TreeJob`, `rank_coupled` and `DynamicExpansion` in tensors. The host copies all levels at the end.

A graph is captured when its size is first needed.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ...core.arrays import ROOT, Int32
from ...core.errors import place_of
from ...core.proposals import Proposal
from ...core.sampling import sampling_rows
from ...kernels.device_tables import StagedBuffer, aligned
from ...kernels.sampling.reference import gumbel_of, uniform
from ...kernels.sampling.sampler import KernelSampler
from ...kernels.sampling.tables import SamplingTables
from ...models.attention.step_attention import PagedKv
from ...models.stage.gpu_path import Capture
from ..model.text_distribution import TextDistribution
from ..model.tree_job import OVERSAMPLE
from .networks.head_network import FeatureNetwork
from .networks.kept_keys import KeptKeys
from .options import HeadOptions

# Of all requests' levels in a graph: more keep a GPU busy for longer than their launches take.
MOST_ROWS = 256
# Texts are padded to a power of two of rows; of all requests, at most so many are copied.
LEAST_CONTEXT, MOST_CONTEXTS = 256, 2**16
# The graph that was used least recently is dropped.
MOST_GRAPHS = 64

logger = logging.getLogger(__name__)


class TextEnd(NamedTuple):
    """The end of a text that a tree stands behind.

    token      the last one, the tree's root
    position   of the row that reads it, which is the text's last one
    said       [1, width]  by that row
    kept       keys and values of the text's rows
    slots      int32 [rows]  where the head's cache has these; one at least
    max_nodes  of the tree
    """

    token: int
    position: int
    said: Tensor
    kept: KeptKeys
    slots: Int32
    distribution: TextDistribution
    max_nodes: int


class GraphSize(NamedTuple):
    """What a graph is captured for.

    requests  at most
    context   rows of a text, at most
    samples   whether any request has a temperature, and so noise
    filters   whether any such request has top_k or top_p
    """

    requests: int
    context: int
    levels: int
    samples: bool
    filters: bool


class DeviceTrees:
    """Dynamic trees of one head, whose texts are in one cache. One thread uses it."""

    def __init__(
        self, name: str, network: FeatureNetwork, kv: PagedKv, vocab_size: int,
        options: HeadOptions, capture: Capture,
    ) -> None:  # fmt: skip
        """`name`: the `source` of its proposals; of `options`, `top_k` and `num_tokens` count."""
        self._name, self._network, self._kv, self._capture = name, network, kv, capture
        self._vocab_size, self._top_k = vocab_size, options.top_k
        self._num_tokens = options.num_tokens
        self._sampler = KernelSampler()
        self._graphs: OrderedDict[GraphSize, TreeGraph] = OrderedDict()
        # A row has as many candidates as a level has nodes.
        self._is_off = options.top_k > vocab_size

    def grow(self, ends: Sequence[TextEnd]) -> tuple[int, list[Proposal]] | None:
        """The number of levels that were drafted, and a tree behind each text.

        All levels are drafted: whether another one pays (`PayingDepth`) could only be seen by a
        wait for the device, which costs more than a captured level.

        None where the host has to grow them: too many rows or keys for a graph, typical_p, or a
        capture that failed, after which no other is tried.
        """
        depths = [min(self._num_tokens, end.max_nodes) for end in ends]
        size = self._size(ends, max(depths))
        graph = None if size is None else self._graph(size, ends[0].said)
        if graph is None:
            return None
        return max(depths), [
            proposal_of(self._name, levels[:depth], self._top_k, end.max_nodes)
            for levels, depth, end in zip(graph.run(ends), depths, ends, strict=True)
        ]

    def _size(self, ends: Sequence[TextEnd], num_levels: int) -> GraphSize | None:
        requests = 1 << (len(ends) - 1).bit_length()
        longest = max(len(end.slots) for end in ends)
        context = max(LEAST_CONTEXT, 1 << (longest - 1).bit_length())
        is_large = requests * self._top_k > MOST_ROWS or requests * context > MOST_CONTEXTS
        ways = [end.distribution for end in ends]
        params = [way.logits_params for way in ways if way.temperature > 0]
        if self._is_off or is_large or any(way.logits_params.typical_p != 1 for way in ways):
            return None
        filters = any(0 < one.top_k < self._vocab_size or one.top_p < 1 for one in params)
        return GraphSize(requests, context, num_levels, bool(params), filters)

    def _graph(self, size: GraphSize, like: Tensor) -> TreeGraph | None:
        """The graph of this size, for rows like this one; None where it cannot be captured."""
        graph = self._graphs.get(size)
        if graph is None:
            try:
                graph = TreeGraph(
                    self._network, self._kv, self._sampler, self._vocab_size, self._top_k, size,
                    like, self._capture,
                )  # fmt: skip
            except Exception as error:
                # The host grows the same trees: a draft is slower, and no step fails.
                self._is_off = True
                self._graphs.clear()
                logger.warning("event=head_graph_failed size=%s error=%s", size, place_of(error))
                logger.debug("event=head_graph_failed", exc_info=True)
                return None
            self._graphs[size] = graph
        self._graphs.move_to_end(size)
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return graph


class TreeGraph:
    """The trees of one `GraphSize`: tensors that are filled before each replay.

    Padding requests are copies of the first one. In the shapes below R are requests, W is `top_k`.
    """

    def __init__(
        self, network: FeatureNetwork, kv: PagedKv, sampler: KernelSampler, vocab_size: int,
        top_k: int, size: GraphSize, like: Tensor, capture: Capture,
    ) -> None:  # fmt: skip
        """`like`: what a row of a text said, [1, width]. Captures; raises what that raises."""
        self._network, self._kv, self._sampler = network, kv, sampler
        self._size, self._width = size, top_k
        self._num_top = min(top_k * (OVERSAMPLE if size.samples else 1), vocab_size)
        requests, device = size.requests, network.device
        # Of each level: rows of the sampling tables, whose addresses have to be aligned.
        self._stride = aligned(requests * top_k)
        self._tables = SamplingTables(size.levels * self._stride, vocab_size, device)
        self._tables.samples, self._tables.filters = size.samples, size.filters
        self._parts = [
            self._tables.part(level * self._stride, requests * top_k)
            for level in range(size.levels)
        ]
        sizes = {"slots": requests * size.context, "lengths": requests, "positions": requests}
        self._inputs = StagedBuffer(sum(map(aligned, sizes.values())), device)
        self._sections = StagedBuffer.sections(sizes)
        self._said = like.new_zeros(requests, like.shape[1])
        # Of each level: tokens and log-probabilities of W candidates after each of W nodes, and
        # which of them go on.
        self._grown = torch.zeros(
            requests, size.levels, 2 * top_k**2 + top_k, dtype=torch.int32, device=device
        )
        self._replay = capture(self._grow)

    def run(self, ends: Sequence[TextEnd]) -> Int32:
        """int32 [texts, levels, 2 W W + W]: what `proposal_of` takes."""
        num_texts = len(ends)
        ends = [*ends, *[ends[0]] * (self._size.requests - len(ends))]
        self._fill(ends)
        torch.cat([end.said for end in ends], out=self._said)
        self._replay()
        return self._grown[:num_texts].cpu().numpy()

    def _fill(self, ends: Sequence[TextEnd]) -> None:
        """What the device reads of these texts: two copies, neither of which is waited for."""
        size, sections, host = self._size, self._sections, self._inputs.next()
        slots = host[sections["slots"]].reshape(size.requests, size.context)
        for line, end in zip(slots, ends, strict=True):
            # Another request's slot may hold NaN, which a probability of zero does not mask.
            line[: len(end.slots)], line[len(end.slots) :] = end.slots, end.slots[0]
        host[sections["lengths"]] = [len(end.slots) for end in ends]
        positions = np.array([end.position for end in ends])
        host[sections["positions"]] = positions
        self._inputs.send(len(host))
        ways = [end.distribution for end in ends]
        counts = np.full(len(ends), self._width, dtype=np.int32)
        counts[-1] += self._stride - counts.sum()
        # The root's children come two behind the row that the text ends with.
        levels = [positions.repeat(counts) + 2 + level for level in range(size.levels)]
        rows = sampling_rows(
            [way.temperature for way in ways] * size.levels,
            [way.logits_params for way in ways] * size.levels,
            [way.seed for way in ways] * size.levels,
            np.concatenate(levels),
            np.tile(counts, size.levels),
        )
        self._tables.refill(rows)

    def _grow(self) -> None:
        """The work that is captured."""
        requests, _, num_levels, *_ = self._size
        width, device = self._width, self._said.device
        slots, lengths = self._input("slots"), self._input("lengths")
        attention = TreeAttention(self._kv, slots, lengths, self._size, width)
        positions = self._input("positions").long()[:, None].expand(-1, width).flatten()
        # The first level has one node, the root. So that it is a level like the others, it has
        # copies of no probability, whose candidates are not proposed.
        paths = torch.full((requests, width), -torch.inf, dtype=torch.float64, device=device)
        paths[:, 0] = 0.0
        said = self._said[:, None].expand(-1, width, -1).flatten(0, 1)
        tokens = picks = positions
        for level in range(num_levels):
            if level:
                attention.begin_level(picks // width)
                said = said.unflatten(0, (requests, width))
                parents = (picks // width)[..., None].expand(-1, -1, said.shape[-1])
                before = said.gather(1, parents).flatten(0, 1)
                said = self._network.behind(before, tokens.flatten(), positions + level, attention)
            ids, given = self._candidates(self._network.logits(said), self._parts[level])
            ids, given = ids.view(requests, -1), given.view(requests, -1)
            paths = (paths[..., None] + given.double().unflatten(1, (width, width))).flatten(1)
            # Of equal paths those of earlier nodes go on.
            picks = paths.sort(dim=1, descending=True, stable=True).indices[:, :width]
            paths, tokens = paths.gather(1, picks), ids.gather(1, picks)
            packed = [ids.int(), given.view(torch.int32), picks.int()]
            self._grown[:, level] = torch.cat(packed, dim=1)

    def _input(self, name: str) -> Tensor:
        return self._inputs.device[self._sections[name]]

    def _candidates(self, logits: Tensor, tables: SamplingTables) -> tuple[Tensor, Tensor]:
        """The candidates after each row, best first, and their log-probabilities given the noise:
        int64 and float32 [rows, W], as `TreeJob` and `rank_coupled` take them."""
        log_probs = self._sampler.log_softmax(logits)
        top = log_probs.topk(self._num_top, dim=-1)
        ids, log_q = top.indices, top.values.clamp(max=0.0)
        if not self._size.samples:
            return ids[:, : self._width], log_q[:, : self._width].contiguous()
        # What the head itself would choose is a candidate, however unlikely it was.
        chosen = self._sampler.choose_by(logits, tables).clamp(min=0).long()[:, None]
        is_known = (ids == chosen).any(dim=1, keepdim=True)
        own = log_probs.gather(1, chosen).clamp(max=0.0).masked_fill(is_known, -torch.inf)
        ids, log_q = torch.cat([ids, chosen], dim=1), torch.cat([log_q, own], dim=1).double()
        temperatures = tables.temperatures.double()[:, None]
        is_greedy = temperatures == 0
        noise = gumbel_of(uniform(tables.keys[:, None], ids)).double()
        scores = log_q / temperatures.masked_fill(is_greedy, 1.0) + noise
        shares = log_q.logsumexp(1, keepdim=True) + scores - scores.logsumexp(1, keepdim=True)
        given = torch.where(is_greedy, log_q, shares.clamp(max=0.0))
        best = given.sort(dim=1, descending=True, stable=True).indices[:, : self._width]
        return ids.gather(1, best), given.gather(1, best).float()


class TreeAttention:
    """An `Attend` (`models/heads/head_layer.py`) of the rows of all trees' levels, [R * W]: each
    sees its text and its path.

    Texts are gathered once, with room for the trees behind them.
    """

    def __init__(
        self, kv: PagedKv, slots: Tensor, lengths: Tensor, size: GraphSize, width: int
    ) -> None:
        """`slots` int32 [R * context], of which texts have the first `lengths`, int32 [R]."""
        self._requests, self._context, self._width = size.requests, size.context, width
        num_nodes = (size.levels - 1) * width
        self._stores = []
        for layer in range(len(kv.layers)):
            pairs = kv.gather(layer, slots).unflatten(0, (size.requests, size.context))
            requests, context, _, heads, head_dim = pairs.shape
            # [2, R, kv_heads, context + nodes, head_dim]
            store = pairs.new_zeros(2, requests, heads, context + num_nodes, head_dim)
            store[:, :, :, :context] = pairs.permute(2, 0, 3, 1, 4)
            self._stores.append(store)
        columns = torch.arange(size.context, device=slots.device)
        is_text = (columns < lengths[:, None])[:, None].expand(-1, width, -1)
        self._mask = is_text
        self._own = torch.eye(width, dtype=torch.bool, device=slots.device).expand(requests, -1, -1)
        self._end = size.context

    def begin_level(self, parents: Tensor) -> None:
        """The rows of the next level, each behind one of the last: int64 [R, W]."""
        lines = parents[..., None].expand(-1, -1, self._mask.shape[-1])
        self._mask = torch.cat([self._mask.gather(1, lines), self._own], dim=-1)
        self._end += self._width

    def __call__(self, index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[R * W, heads, head_dim]: what each row attends to."""
        store, shape = self._stores[index], (self._requests, self._width)
        own = slice(self._end - self._width, self._end)
        store[0, :, :, own] = keys.unflatten(0, shape).transpose(1, 2)
        store[1, :, :, own] = values.unflatten(0, shape).transpose(1, 2)
        kv_heads = keys.shape[1]
        share = queries.shape[1] // kv_heads
        # Query heads are folded into the rows of their key's head: no key is repeated.
        folded = queries.view(*shape, kv_heads, share, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
        found = scaled_dot_product_attention(
            folded,
            store[0, :, :, : self._end],
            store[1, :, :, : self._end],
            attn_mask=self._mask.repeat(1, share, 1)[:, None],
        )
        return found.unflatten(2, (share, -1)).permute(0, 3, 1, 2, 4).reshape(queries.shape)


def proposal_of(name: str, grown: Int32, top_k: int, max_nodes: int) -> Proposal:
    """At most so many of a tree's nodes, those of the most probable paths (`GrownNodes.best`).

    grown  int32 [levels, 2 W W + W] of `TreeGraph.run`, for a `top_k` of W
    """
    size = top_k**2
    tokens, picks = grown[:, :size], grown[:, 2 * size :]
    given = grown[:, size : 2 * size].view(np.float32)
    # Behind the root are the candidates of its own row alone.
    parents = [np.full(top_k, ROOT, dtype=np.int32)]
    paths, first = [given[0, :top_k].astype(np.float64)], 0
    for level in range(1, len(grown)):
        before = picks[level - 1]
        parents.append((first + before).repeat(top_k))
        paths.append(paths[-1][before].repeat(top_k) + given[level])
        first += len(parents[level - 1])
    # Nodes stand by level: a stable order keeps parents before children.
    kept = np.argsort(-np.concatenate(paths), kind="stable")[:max_nodes]
    places = np.full(first + len(parents[-1]) + 1, ROOT, dtype=np.int32)
    places[kept] = np.arange(len(kept), dtype=np.int32)
    return Proposal(
        name,
        np.concatenate([tokens[0, :top_k], tokens[1:].ravel()])[kept],
        places[np.concatenate(parents)[kept]],
        np.concatenate([given[0, :top_k], given[1:].ravel()])[kept],
    )
