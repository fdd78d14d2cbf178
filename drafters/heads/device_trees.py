"""Trees that a head grows on a GPU: all levels of several requests in one captured graph.

`TreeGrowth` looks at every level on the host: on a GPU most of its time are launches and waits.
Here shapes are fixed. The device itself takes the candidates of a level, ranks them with the
requests' noise, and chooses the nodes that go on, as `drafters/model/` does it on the host:
`TreeJob`, `rank_siblings` and `DynamicExpansion` in tensors. The host copies all levels at the end.

A graph is captured when its size is first needed.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
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
from ...kernels.device_tables import ALIGNMENT, StagedBuffer, aligned
from ...kernels.sampling.sampler import KernelSampler
from ...kernels.sampling.tables import SamplingTables
from ...models.attention.step_attention import PagedKv
from ...models.stage.gpu_path import Capture, Work
from ..model.expansion import BestFirstExpansion
from ..model.text_distribution import TextDistribution
from ..model.tree_job import OVERSAMPLE
from .networks.head_network import FeatureNetwork, HeadNetwork, SpecFormerNetwork
from .networks.kept_keys import KeptKeys, sides_of
from .networks.parallel_networks import MedusaNetwork
from .options import BEST_FIRST, DYNAMIC, MOST_CHILDREN, HeadOptions

# In a pass. More keep a GPU busy for longer than their launches take.
MOST_ROWS = 256
# Texts are padded to a power of two of rows; of all requests, at most so many are copied.
LEAST_CONTEXT, MOST_CONTEXTS = 256, 2**16
# The graph that was used least recently is dropped.
MOST_GRAPHS = 64

logger = logging.getLogger(__name__)

ParallelNetwork = SpecFormerNetwork | MedusaNetwork


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
    context   rows of a text, at most; 0: the head looks at none
    width     candidates after a node
    samples   whether any request has a temperature, and so noise
    filters   whether any such request has top_k or top_p
    """

    requests: int
    context: int
    levels: int
    width: int
    samples: bool
    filters: bool


def device_trees(
    name: str, network: HeadNetwork, kv: PagedKv, said: Tensor, vocab_size: int,
    options: HeadOptions, capture: Capture | None,
) -> DeviceTrees | None:  # fmt: skip
    """Of a head whose trees a graph can grow; None for others, and where nothing is captured.

    These are EAGLE-2's trees of heads that draft level by level, and trees of the best nodes of
    heads that say all levels by the text's last row alone. `said`: what any row said, [1, width].
    """
    tree = options.of_head(says_all_levels=network.says_all_levels).tree
    if isinstance(network, FeatureNetwork):
        fits = tree == DYNAMIC and not network.says_all_levels and options.top_k <= vocab_size
    elif isinstance(network, ParallelNetwork):
        fits = tree == BEST_FIRST
    else:
        return None
    if capture is None or not fits:
        return None
    return DeviceTrees(name, network, kv, said, vocab_size, options, capture)


class DeviceTrees:
    """Trees of one head, whose texts are in one cache. One thread uses it."""

    def __init__(
        self, name: str, network: FeatureNetwork | ParallelNetwork, kv: PagedKv, said: Tensor,
        vocab_size: int, options: HeadOptions, capture: Capture,
    ) -> None:  # fmt: skip
        """`name`: the `source` of its proposals; `said`: what any row said, [1, width]."""
        self._name, self._network, self._kv, self._said = name, network, kv, said
        self._vocab_size, self._capture = vocab_size, capture
        self._sampler = KernelSampler()
        self._top_k = options.top_k
        self._num_levels = min(network.most_levels or options.num_tokens, options.num_tokens)
        self._graphs: OrderedDict[GraphSize, HeadGraph] = OrderedDict()
        self._has_failed = False

    @torch.inference_mode()
    def capture_first(self) -> bool:
        """Capture small graphs, so that no request waits until their kernels are compiled; whether
        the head can have any.
        """
        sizes = [
            self._size(1, 1, MOST_CHILDREN, samples=samples, filters=filters)
            for samples, filters in ((False, False), (True, False), (True, True))
        ]
        tried = self._made(sizes[0])
        tried.grow()
        obstacle = self._capture.obstacle(tried.grow)
        if obstacle is not None:
            logger.warning("event=head_graphs_not_captured name=%s reason=%r", self._name, obstacle)
            return False
        for size in sizes:
            self._graph(size)
        return not self._has_failed

    def grow(self, ends: Sequence[TextEnd]) -> tuple[int, list[Proposal]] | None:
        """The number of levels that took a pass each, and a tree behind each text.

        All levels are drafted: whether another one pays (`PayingDepth`) could only be seen by a
        wait for the device, which costs more than a captured level.

        None where the host has to grow them: too many rows for a graph, typical_p, or a capture
        that failed, after which no other is tried.
        """
        ways = [end.distribution for end in ends]
        if any(way.logits_params.typical_p != 1 for way in ways):
            return None
        params = [way.logits_params for way in ways if way.temperature > 0]
        size = self._size(
            len(ends), max(len(end.slots) for end in ends), max(end.max_nodes for end in ends),
            samples=bool(params),
            filters=any(0 < one.top_k < self._vocab_size or one.top_p < 1 for one in params),
        )  # fmt: skip
        rows = size.requests * (size.width if size.context else size.levels)
        if rows > MOST_ROWS or size.requests * size.context > MOST_CONTEXTS:
            return None
        graph = self._graph(size)
        if graph is None:
            return None
        depths = [min(self._num_levels, end.max_nodes) for end in ends]
        proposals = graph.propose(self._name, ends, depths)
        return (0 if self._network.says_all_levels else size.levels), proposals

    def _size(
        self, num_texts: int, longest: int, max_nodes: int, *, samples: bool, filters: bool
    ) -> GraphSize:
        """The size of a graph for so many texts, the longest one, and the largest tree."""
        requests = power_of_two(num_texts)
        if self._network.says_all_levels:
            # Rows of a level are those of a sampling table, whose addresses have to be aligned.
            requests = max(requests, ALIGNMENT)
            width = min(power_of_two(max_nodes), MOST_CHILDREN, self._vocab_size)
            return GraphSize(requests, 0, self._num_levels, width, samples, filters)
        context = power_of_two(max(longest, LEAST_CONTEXT))
        levels = min(self._num_levels, max_nodes)
        return GraphSize(requests, context, levels, self._top_k, samples, filters)

    def _graph(self, size: GraphSize) -> HeadGraph | None:
        """The graph of this size; None where it cannot be captured."""
        graph = self._graphs.get(size)
        if graph is None and self._has_failed:
            return None
        if graph is None:
            try:
                graph = self._captured(size)
            except Exception as error:
                # The host grows the same trees: a draft is slower, and no step fails.
                self._has_failed = True
                self._graphs.clear()
                logger.warning("event=head_graph_failed size=%s error=%s", size, place_of(error))
                logger.debug("event=head_graph_failed", exc_info=True)
                return None
            self._graphs[size] = graph
        self._graphs.move_to_end(size)
        if len(self._graphs) > MOST_GRAPHS:
            self._graphs.popitem(last=False)
        return graph

    def _captured(self, size: GraphSize) -> HeadGraph:
        graph = self._made(size)
        graph.replay = self._capture(graph.grow)
        return graph

    def _made(self, size: GraphSize) -> HeadGraph:
        network, sampler = self._network, self._sampler
        if isinstance(network, FeatureNetwork):
            return TreeGraph(network, self._kv, sampler, self._vocab_size, self._said, size)
        return LevelsGraph(network, sampler, self._vocab_size, self._said, size)


def power_of_two(count: int) -> int:
    """The next one, `count` itself included."""
    return 1 << (count - 1).bit_length()


class HeadGraph(ABC):
    """The trees of one `GraphSize`: tensors that are filled before each replay.

    Padding requests are copies of the first one. In shapes R are requests, L levels, W is the
    width.
    """

    def __init__(
        self, sampler: KernelSampler, vocab_size: int, said: Tensor, size: GraphSize, rows_each: int
    ) -> None:
        """`rows_each`: rows of a request in a level. Its owner captures `grow`."""
        self._sampler, self._size, self._rows_each = sampler, size, rows_each
        self._num_top = min(size.width * (OVERSAMPLE if size.samples else 1), vocab_size)
        # Rows of a level in the tables, so that those of each begin at an aligned address.
        self._stride = aligned(size.requests * rows_each)
        self._tables = SamplingTables(size.levels * self._stride, vocab_size, said.device)
        self._tables.samples, self._tables.filters = size.samples, size.filters
        sizes = {
            "slots": size.requests * size.context, "lengths": size.requests,
            "positions": size.requests,
        }  # fmt: skip
        self._inputs = StagedBuffer(sum(map(aligned, sizes.values())), said.device)
        self._sections = StagedBuffer.sections(sizes)
        self._said = said.new_zeros(size.requests, said.shape[1])
        # Until it is captured.
        self.replay: Work = self.grow

    @abstractmethod
    def grow(self) -> None:
        """The work that is captured."""

    @abstractmethod
    def propose(self, name: str, ends: Sequence[TextEnd], depths: Sequence[int]) -> list[Proposal]:
        """A tree of at most so many levels behind each text, proposed by `name`."""

    def _run(self, ends: Sequence[TextEnd]) -> None:
        ends = [*ends, *[ends[0]] * (self._size.requests - len(ends))]
        self._fill(ends)
        torch.cat([end.said for end in ends], out=self._said)
        self.replay()

    def _fill(self, ends: Sequence[TextEnd]) -> None:
        """What the device reads of these texts: two copies, neither of which is waited for."""
        size, host = self._size, self._inputs.next()
        if size.context:
            slots = host[self._sections["slots"]].reshape(size.requests, size.context)
            for line, end in zip(slots, ends, strict=True):
                # Another request's slot may hold NaN, which a probability of zero does not mask.
                line[: len(end.slots)], line[len(end.slots) :] = end.slots, end.slots[0]
        positions = np.array([end.position for end in ends])
        host[self._sections["lengths"]] = [len(end.slots) for end in ends]
        host[self._sections["positions"]] = positions
        self._inputs.send(len(host))
        ways = [end.distribution for end in ends]
        counts = np.full(len(ends), self._rows_each, dtype=np.int32)
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

    def _input(self, name: str) -> Tensor:
        return self._inputs.device[self._sections[name]]

    def _candidates(self, logits: Tensor, tables: SamplingTables) -> tuple[Tensor, Tensor]:
        """The candidates after each row, best first, and their log-probabilities given the noise:
        int64 and float32 [rows, W], as `TreeJob` and `rank_siblings` take them."""
        log_probs = self._sampler.log_softmax(logits)
        top = log_probs.topk(self._num_top, dim=-1)
        ids, log_q = top.indices, top.values.clamp(max=0.0)
        if not self._size.samples:
            return ids, log_q
        # What the head itself would choose is a candidate, however unlikely it was.
        chosen = self._sampler.choose_by(logits, tables).clamp(min=0).long()[:, None]
        is_known = (ids == chosen).any(dim=1, keepdim=True)
        own = log_probs.gather(1, chosen).clamp(max=0.0).masked_fill(is_known, -torch.inf)
        ids, log_q = torch.cat([ids, chosen], dim=1), torch.cat([log_q, own], dim=1).double()
        temperatures = tables.temperatures.double()[:, None]
        is_greedy = temperatures == 0
        noise = self._sampler.noise(ids, tables)
        scores = log_q / temperatures.masked_fill(is_greedy, 1.0) + noise
        shares = log_q.logsumexp(1, keepdim=True) + scores - scores.logsumexp(1, keepdim=True)
        given = torch.where(is_greedy, log_q, shares.clamp(max=0.0))
        best = given.sort(dim=1, descending=True, stable=True).indices[:, : self._size.width]
        return ids.gather(1, best), given.gather(1, best).float()


class LevelsGraph(HeadGraph):
    """The levels of a head that says all of them by the text's last row, in one pass."""

    def __init__(
        self, network: ParallelNetwork, sampler: KernelSampler, vocab_size: int, said: Tensor,
        size: GraphSize,
    ) -> None:  # fmt: skip
        super().__init__(sampler, vocab_size, said, size, rows_each=1)
        self._network = network
        # Tokens, and their log-probabilities.
        shape = 2, size.levels * size.requests, size.width
        self._grown = torch.zeros(shape, dtype=torch.int32, device=said.device)

    def grow(self) -> None:
        """The work that is captured."""
        logits = self._network.logits_of_levels(self._said)[:, : self._size.levels]
        rows = logits.transpose(0, 1).flatten(0, 1)
        ids, given = self._candidates(rows, self._tables.part(0, len(rows)))
        self._grown.copy_(torch.stack([ids.int(), given.view(torch.int32)]))

    def propose(self, name: str, ends: Sequence[TextEnd], depths: Sequence[int]) -> list[Proposal]:
        """As `HeadGraph`."""
        self._run(ends)
        shape = 2, self._size.levels, self._size.requests, self._size.width
        tokens, values = self._grown.cpu().numpy().reshape(shape)
        given, proposals = values.view(np.float32), list[Proposal]()
        for place, (end, depth) in enumerate(zip(ends, depths, strict=True)):
            expansion = BestFirstExpansion(min(end.max_nodes, MOST_CHILDREN), depth)
            most = expansion.num_candidates
            for level in range(depth):
                expansion.grow(
                    [tokens[level, place, :most].tolist()], [given[level, place, :most].tolist()]
                )
            proposals.append(Proposal(name, *expansion.best(end.max_nodes)))
        return proposals


class TreeGraph(HeadGraph):
    """EAGLE-2's trees of a head that drafts level by level: W nodes of a level go on, and each has
    W candidates."""

    def __init__(
        self, network: FeatureNetwork, kv: PagedKv, sampler: KernelSampler, vocab_size: int,
        said: Tensor, size: GraphSize,
    ) -> None:  # fmt: skip
        super().__init__(sampler, vocab_size, said, size, rows_each=size.width)
        self._network, self._kv = network, kv
        # Of each level: tokens and log-probabilities of W candidates after each of W nodes, and
        # which of them go on.
        shape = size.requests, size.levels, 2 * size.width**2 + size.width
        self._grown = torch.zeros(shape, dtype=torch.int32, device=said.device)

    def grow(self) -> None:
        """The work that is captured."""
        requests, width, device = self._size.requests, self._size.width, self._said.device
        slots, lengths = self._input("slots"), self._input("lengths")
        attention = TreeAttention(self._kv, slots, lengths, self._size)
        positions = self._input("positions").long()[:, None].expand(-1, width).flatten()
        # The first level has one node, the root. So that it is a level like the others, it has
        # copies of no probability, whose candidates never go on and are not proposed.
        said = self._said[:, None].expand(-1, width, -1).flatten(0, 1)
        paths = torch.full((requests, width), -torch.inf, dtype=torch.float64, device=device)
        paths[:, 0] = 0.0
        tokens = picks = positions
        for level in range(self._size.levels):
            if level:
                parents = picks // width
                attention.begin_level(parents)
                rows = parents[..., None].expand(-1, -1, said.shape[-1])
                before = said.unflatten(0, (requests, width)).gather(1, rows).flatten(0, 1)
                said = self._network.behind(before, tokens.flatten(), positions + level, attention)
            tables = self._tables.part(level * self._stride, requests * width)
            ids, given = self._candidates(self._network.logits(said), tables)
            ids, given = ids.reshape(requests, -1), given.reshape(requests, -1)
            paths = (paths[..., None] + given.double().unflatten(1, (width, width))).flatten(1)
            # Of equal paths those of earlier nodes go on.
            picks = paths.sort(dim=1, descending=True, stable=True).indices[:, :width]
            paths, tokens = paths.gather(1, picks), ids.gather(1, picks)
            packed = [ids.int(), given.view(torch.int32), picks.int()]
            self._grown[:, level] = torch.cat(packed, dim=1)

    def propose(self, name: str, ends: Sequence[TextEnd], depths: Sequence[int]) -> list[Proposal]:
        """As `HeadGraph`."""
        self._run(ends)
        grown = self._grown[: len(ends)].cpu().numpy()
        return [
            self._proposal(name, levels[:depth], end.max_nodes)
            for levels, depth, end in zip(grown, depths, ends, strict=True)
        ]

    def _proposal(self, name: str, levels: Int32, max_nodes: int) -> Proposal:
        """The nodes of the most probable paths, as `GrownNodes.best` takes them."""
        width, size = self._size.width, self._size.width**2
        tokens, picks = levels[:, :size], levels[:, 2 * size :]
        given = levels[:, size : 2 * size].view(np.float32)
        # Behind the root are the candidates of its own row alone.
        parents = [np.full(width, ROOT, dtype=np.int32)]
        paths, first = [given[0, :width].astype(np.float64)], 0
        for level in range(1, len(levels)):
            before = picks[level - 1]
            parents.append((first + before).repeat(width))
            paths.append(paths[-1][before].repeat(width) + given[level])
            first += len(parents[level - 1])
        # Nodes stand by level: a stable order keeps parents before children.
        kept = np.argsort(-np.concatenate(paths), kind="stable")[:max_nodes]
        places = np.full(first + len(parents[-1]) + 1, ROOT, dtype=np.int32)
        places[kept] = np.arange(len(kept), dtype=np.int32)
        return Proposal(
            name,
            np.concatenate([tokens[0, :width], tokens[1:].ravel()])[kept],
            places[np.concatenate(parents)[kept]],
            np.concatenate([given[0, :width], given[1:].ravel()])[kept],
        )


class TreeAttention:
    """An `Attend` (`models/heads/head_layer.py`) of the rows of a level of all trees, [R * W]: each
    sees its text and its path.

    Texts are gathered once, with room for the trees behind them.
    """

    def __init__(self, kv: PagedKv, slots: Tensor, lengths: Tensor, size: GraphSize) -> None:
        """`slots` int32 [R * context], of which texts have the first `lengths`, int32 [R]."""
        self._shape = requests, width = size.requests, size.width
        self._end = size.context
        # [sides, R, kv_heads, context + nodes, head_dim] of each layer
        self._stores: list[Tensor] = []
        for layer in range(len(kv.layers)):
            pairs = kv.gather(layer, slots).unflatten(0, (requests, size.context))
            heads, head_dim = pairs.shape[3:]
            num_columns = size.context + (size.levels - 1) * width
            store = pairs.new_empty(pairs.shape[2], requests, heads, num_columns, head_dim)
            store[:, :, :, : size.context] = pairs.permute(2, 0, 3, 1, 4)
            self._stores.append(store)
        columns = torch.arange(size.context, device=slots.device)
        # bool [R, W, columns]: what each row of the level sees.
        self._mask = (columns < lengths[:, None])[:, None].expand(-1, width, -1)
        self._own = torch.eye(width, dtype=torch.bool, device=slots.device).expand(requests, -1, -1)

    def begin_level(self, parents: Tensor) -> None:
        """The rows of the next level, each behind one of the last: int64 [R, W]."""
        lines = parents[..., None].expand(-1, -1, self._mask.shape[-1])
        self._mask = torch.cat([self._mask.gather(1, lines), self._own], dim=-1)
        self._end += self._shape[1]

    def __call__(self, index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[R * W, heads, head_dim]: what each row attends to."""
        store = self._stores[index]
        own = slice(self._end - self._shape[1], self._end)
        sides = sides_of(keys, values).unflatten(1, self._shape)
        store[:, :, :, own] = sides.transpose(2, 3)
        # Query heads are folded into the rows of their key's head: no key is repeated.
        kv_heads = keys.shape[1]
        share = queries.shape[1] // kv_heads
        grouped = queries.view(*self._shape, kv_heads, share, -1)
        found = scaled_dot_product_attention(
            grouped.permute(0, 2, 3, 1, 4).flatten(2, 3),
            store[0, :, :, : self._end],
            store[-1, :, :, : self._end],
            attn_mask=self._mask.repeat(1, share, 1)[:, None],
        )
        return found.unflatten(2, (share, -1)).permute(0, 3, 1, 2, 4).reshape(queries.shape)
