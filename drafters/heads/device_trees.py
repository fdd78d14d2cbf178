"""Trees that a head grows on a GPU: all levels of several requests in one captured graph.

`TreeGrowth` looks at every level on the host: on a GPU most of its time are launches and waits.
Here shapes are fixed. The device itself takes the candidates of a level, ranks them with the
requests' noise, and chooses the nodes that go on, as `drafters/model/` does it on the host:
`TreeJob`, `rank_siblings` and `DynamicExpansion` in tensors. The host copies all levels at the end.
`TreeGraph` is of heads that draft level by level, `LevelsGraph` of those that draft all levels at
once.

A graph is captured when its size is first needed.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...core.arrays import ROOT, Int32
from ...core.errors import place_of
from ...core.proposals import Proposal
from ...core.sampling import sampling_rows
from ...kernels.device_tables import StagedBuffer, aligned
from ...kernels.sampling.sampler import KernelSampler
from ...kernels.sampling.tables import SamplingTables
from ...models.attention.step_attention import PagedKv
from ...models.stage.gpu_path import Capture, Work
from ..model.expansion import BestFirstExpansion
from ..model.text_distribution import TextDistribution
from ..model.tree_job import OVERSAMPLE
from .graph_attention import GatheredTexts, RowsBehind, TreeAttention
from .networks.block_network import DSparkNetwork
from .networks.head_network import FeatureNetwork, HeadNetwork, ParallelNetwork, TextEnds
from .networks.kept_keys import KeptKeys
from .options import BEST_FIRST, DYNAMIC, MOST_CHILDREN, HeadOptions

# In a pass. More keep a GPU busy for longer than their launches take.
MOST_ROWS = 256
# Texts are padded to a power of two of rows, long ones to a multiple of `LONG_STEP`.
LEAST_CONTEXT, LONG_CONTEXT, LONG_STEP = 256, 8192, 1024
# Rows of all requests' texts that are copied: once for each layer, and once more for a while. If a
# row is 8 heads of 128 in 16 bits, that is half a GiB.
MOST_COPIED = 2**17
# The graph that was used least recently is dropped.
MOST_GRAPHS = 64

logger = logging.getLogger(__name__)


class TextEnd(NamedTuple):
    """The end of a text that a tree stands behind.

    token      the last one, the tree's root
    position   of the text's last row, one before the token's
    output     [1, width]  of that row
    kept       keys and values of the text's rows
    slots      int32 [rows]  where the head's cache has these; one at least
    max_nodes  of the tree
    """

    token: int
    position: int
    output: Tensor
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
    name: str, network: HeadNetwork, kv: PagedKv, output: Tensor, vocab_size: int,
    options: HeadOptions, capture: Capture | None,
) -> DeviceTrees | None:  # fmt: skip
    """Of a head whose trees a graph can grow; None for others, and where nothing is captured.

    These are EAGLE-2's trees of heads that draft level by level, unless their confidence ends them,
    and trees of the best nodes of heads that draft all levels at once.

    output  [1, width]  of any row
    """
    if capture is None:
        return None
    tree = options.of_head(is_parallel=network.is_parallel).tree
    if isinstance(network, ParallelNetwork):
        fits = tree == BEST_FIRST
    elif isinstance(network, FeatureNetwork | DSparkNetwork):
        is_cut = isinstance(network, DSparkNetwork) and network.has_confidence
        fits = tree == DYNAMIC and options.top_k <= vocab_size
        fits = fits and not (is_cut and options.min_confidence)
    else:
        return None
    return DeviceTrees(name, network, kv, output, vocab_size, options, capture) if fits else None


GraphNetwork = FeatureNetwork | DSparkNetwork | ParallelNetwork


class DeviceTrees:
    """Trees of one head, whose texts are in one cache. One thread uses it."""

    def __init__(
        self, name: str, network: GraphNetwork, kv: PagedKv, output: Tensor, vocab_size: int,
        options: HeadOptions, capture: Capture,
    ) -> None:  # fmt: skip
        """`name`: the `source` of its proposals; `output`: of any row, [1, width]."""
        self._name, self._network, self._kv, self._output = name, network, kv, output
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

        None where the host has to grow them: too many rows or too long texts for a graph,
        typical_p, or a capture that failed, after which no other is tried.
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
        num_copied = size.requests * size.context * (self._network.num_layers + 1)
        if self._num_rows(size) > MOST_ROWS or num_copied > MOST_COPIED:
            return None
        graph = self._graph(size)
        if graph is None:
            return None
        depths = [min(self._num_levels, end.max_nodes) for end in ends]
        proposals = graph.propose(self._name, ends, depths)
        return (0 if self._network.is_parallel else size.levels), proposals

    def _size(
        self, num_texts: int, longest: int, max_nodes: int, *, samples: bool, filters: bool
    ) -> GraphSize:
        """The size of a graph for so many texts, the longest one, and the largest tree."""
        requests, network = power_of_two(num_texts), self._network
        context = power_of_two(max(longest, LEAST_CONTEXT))
        if context > LONG_CONTEXT:
            context = -(-longest // LONG_STEP) * LONG_STEP
        levels, width = min(self._num_levels, max_nodes), self._top_k
        if isinstance(network, ParallelNetwork):
            levels = self._num_levels
            width = min(power_of_two(max_nodes), MOST_CHILDREN, self._vocab_size)
            context = context if network.num_behind(levels) else 0
        return GraphSize(requests, context, levels, width, samples, filters)

    def _num_rows(self, size: GraphSize) -> int:
        """Rows of the largest pass."""
        network, a_level = self._network, size.width
        if isinstance(network, ParallelNetwork):
            a_level = max(size.levels, network.num_behind(size.levels))
        elif isinstance(network, DSparkNetwork):
            a_level = max(size.width, network.num_behind(size.levels))
        return size.requests * a_level

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
        network = self._network
        shared = self._kv, self._sampler, self._vocab_size, self._output, size
        if isinstance(network, ParallelNetwork):
            return LevelsGraph(network, *shared)
        return TreeGraph(network, *shared)


def power_of_two(count: int) -> int:
    """The next one, `count` itself included."""
    return 1 << (count - 1).bit_length()


class HeadGraph(ABC):
    """The trees of one `GraphSize`: tensors that are filled before each replay.

    Padding requests are copies of the first one. In shapes R are requests, L levels, W is the
    width.
    """

    def __init__(
        self, kv: PagedKv, sampler: KernelSampler, vocab_size: int, output: Tensor, size: GraphSize,
        rows_each: int, stride: int,
    ) -> None:  # fmt: skip
        """`rows_each`: rows of a request in a level; `stride`: of a level in the sampling tables.
        Its owner captures `grow`."""
        self._kv, self._sampler, self._size = kv, sampler, size
        self._rows_each, self._stride = rows_each, stride
        self._num_top = min(size.width * (OVERSAMPLE if size.samples else 1), vocab_size)
        self._tables = SamplingTables(size.levels * self._stride, vocab_size, output.device)
        self._tables.samples, self._tables.filters = size.samples, size.filters
        sizes = {
            "slots": size.requests * size.context, "lengths": size.requests,
            "positions": size.requests, "tokens": size.requests, "num_candidates": size.requests,
        }  # fmt: skip
        self._inputs = StagedBuffer(sum(map(aligned, sizes.values())), output.device)
        self._sections = StagedBuffer.sections(sizes)
        self._outputs = output.new_zeros(size.requests, output.shape[1])
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
        torch.cat([end.output for end in ends], out=self._outputs)
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
        # Of the last tokens, which stand behind the last rows.
        host[self._sections["positions"]] = positions + 1
        host[self._sections["tokens"]] = [end.token for end in ends]
        host[self._sections["num_candidates"]] = [
            OVERSAMPLE * min(end.max_nodes, size.width) for end in ends
        ]
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

    def _ends(self) -> TextEnds:
        """Of the texts, on the device."""
        tokens, positions = self._input("tokens").long(), self._input("positions").long()
        return TextEnds(tokens, positions, self._outputs)

    def _texts(self, num_behind: int) -> GatheredTexts:
        """The texts, with room for so many rows behind each."""
        slots, lengths = self._input("slots"), self._input("lengths")
        return GatheredTexts(self._kv, slots, lengths, self._size.context, num_behind)

    def _candidates(
        self, logits: Tensor, tables: SamplingTables, counts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The candidates after each row, best first, and their log-probabilities given the noise:
        int64 and float32 [rows, W], as `TreeJob` and `rank_siblings` take them.

        counts  int32 [rows]: of tokens that are looked at with a temperature; None: as many as are
                for W candidates
        """
        log_probs = self._sampler.log_softmax(logits)
        top = log_probs.topk(self._num_top, dim=-1)
        ids, log_q = top.indices, top.values.clamp(max=0.0)
        if not self._size.samples:
            return ids, log_q
        if counts is not None:
            is_over = torch.arange(self._num_top, device=ids.device) >= counts[:, None]
            ids, log_q = ids.masked_fill(is_over, -1), log_q.masked_fill(is_over, -torch.inf)
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
    """The levels of a head that drafts all of them in one pass."""

    def __init__(
        self, network: ParallelNetwork, kv: PagedKv, sampler: KernelSampler, vocab_size: int,
        output: Tensor, size: GraphSize,
    ) -> None:  # fmt: skip
        super().__init__(kv, sampler, vocab_size, output, size, rows_each=1, stride=size.requests)
        self._network = network
        # Tokens, and their log-probabilities.
        shape = 2, size.levels * size.requests, size.width
        self._grown = torch.zeros(shape, dtype=torch.int32, device=output.device)

    def grow(self) -> None:
        """The work that is captured."""
        network, levels = self._network, self._size.levels
        num_behind = network.num_behind(levels)
        attention = RowsBehind(self._texts(num_behind), num_behind, network.view)
        logits = network.logits_of_levels(self._ends(), levels, attention)
        rows = logits.transpose(0, 1).flatten(0, 1)
        # A tree that may have fewer nodes than others looks at fewer candidates, too.
        counts = self._input("num_candidates").repeat(levels)
        ids, given = self._candidates(rows, self._tables.part(0, len(rows)), counts)
        self._grown.copy_(torch.stack([ids.int(), given.view(torch.int32)]))

    def propose(self, name: str, ends: Sequence[TextEnd], depths: Sequence[int]) -> list[Proposal]:
        """As `HeadGraph`."""
        self._run(ends)
        shape = 2, self._size.levels, self._size.requests, self._size.width
        tokens, values = self._grown.cpu().numpy().reshape(shape)
        given, proposals = values.view(np.float32), list[Proposal]()
        for place, (end, depth) in enumerate(zip(ends, depths, strict=True)):
            expansion = BestFirstExpansion(min(end.max_nodes, MOST_CHILDREN), depth)
            for level in range(depth):
                own = given[level, place, : expansion.num_candidates]
                # A head of few tokens has no more.
                count = int((own > -np.inf).sum())
                expansion.grow([tokens[level, place, :count].tolist()], [own[:count].tolist()])
            proposals.append(Proposal(name, *expansion.best(end.max_nodes)))
        return proposals


class TreeGraph(HeadGraph):
    """EAGLE-2's trees of a head that drafts level by level: W nodes of a level go on, and each has
    W candidates."""

    def __init__(
        self, network: FeatureNetwork | DSparkNetwork, kv: PagedKv, sampler: KernelSampler,
        vocab_size: int, output: Tensor, size: GraphSize,
    ) -> None:  # fmt: skip
        width = size.width
        # Rows of each level begin at an aligned address.
        stride = aligned(size.requests * width)
        super().__init__(kv, sampler, vocab_size, output, size, rows_each=width, stride=stride)
        self._network = network
        # Of each level: tokens and log-probabilities of W candidates after each of W nodes, and
        # which of them go on.
        shape = size.requests, size.levels, 2 * width**2 + width
        self._grown = torch.zeros(shape, dtype=torch.int32, device=output.device)

    def grow(self) -> None:
        """The work that is captured."""
        requests, width, device = self._size.requests, self._size.width, self._outputs.device
        drafts = self._begun()
        # The first level has one node, the root. So that it is a level like the others, it has
        # copies of no probability, whose candidates never go on and are not proposed.
        paths = torch.full((requests, width), -torch.inf, dtype=torch.float64, device=device)
        paths[:, 0] = 0.0
        logits = drafts.first()
        for level in range(self._size.levels):
            tables = self._tables.part(level * self._stride, requests * width)
            ids, given = self._candidates(logits, tables)
            ids, given = ids.reshape(requests, -1), given.reshape(requests, -1)
            paths = (paths[..., None] + given.double().unflatten(1, (width, width))).flatten(1)
            # Of equal paths those of earlier nodes go on.
            picks = paths.sort(dim=1, descending=True, stable=True).indices[:, :width]
            paths, tokens = paths.gather(1, picks), ids.gather(1, picks)
            packed = [ids.int(), given.view(torch.int32), picks.int()]
            self._grown[:, level] = torch.cat(packed, dim=1)
            if level + 1 < self._size.levels:
                logits = drafts.next(picks // width, tokens)

    def _begun(self) -> DraftLevels:
        network, size = self._network, self._size
        if isinstance(network, FeatureNetwork):
            texts = self._texts((size.levels - 1) * size.width)
            return FeatureLevels(network, self._ends(), texts, size.width)
        block_size = network.num_behind(size.levels)
        attention = RowsBehind(self._texts(block_size), block_size, network.view)
        return MarkovLevels(network, self._ends(), attention, size)

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


class DraftLevels(Protocol):
    """Logits of all trees, float32 [R * W, vocabulary], one level a call."""

    def first(self) -> Tensor:
        """Of what follows the roots, W times each."""
        ...

    def next(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """Of what follows the next level's nodes: their parents in the last one, and their tokens,
        int64 [R, W]."""
        ...


class FeatureLevels:
    """Nodes go on from the outputs of their parents, and attend to texts and paths."""

    def __init__(
        self, network: FeatureNetwork, ends: TextEnds, texts: GatheredTexts, width: int
    ) -> None:
        self._network = network
        self._outputs = ends.outputs[:, None].expand(-1, width, -1)
        # Of rows, which stand one before their tokens.
        self._positions = (ends.positions - 1)[:, None].expand(-1, width).flatten()
        self._attention = TreeAttention(texts, width)

    def first(self) -> Tensor:
        """As `DraftLevels`."""
        return self._network.logits(self._outputs.flatten(0, 1))

    def next(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """As `DraftLevels`."""
        self._attention.begin_level(parents)
        self._positions = self._positions + 1
        before = of_parents(self._outputs, parents).flatten(0, 1)
        outputs = self._network.behind(before, tokens.flatten(), self._positions, self._attention)
        self._outputs = outputs.unflatten(0, parents.shape)
        return self._network.logits(outputs)


class MarkovLevels:
    """A block has logits of all levels; the bias by the tokens on paths is added level by level."""

    def __init__(
        self, network: DSparkNetwork, ends: TextEnds, attention: RowsBehind, size: GraphSize
    ) -> None:
        self._network = network
        states = network.states_of_levels(ends, size.levels, attention)
        raw = network.raw_logits(states.flatten(0, 1)).unflatten(0, states.shape[:2])
        self._of_levels = zip(states.unbind(1), raw.unbind(1), strict=True)
        self._roots = ends.tokens[:, None].expand(-1, size.width)
        self._memories = network.first_memory.expand(*self._roots.shape, -1)

    def first(self) -> Tensor:
        """As `DraftLevels`."""
        return self._next_level(self._roots)

    def next(self, parents: Tensor, tokens: Tensor) -> Tensor:
        """As `DraftLevels`."""
        self._memories = of_parents(self._memories, parents)
        return self._next_level(tokens)

    def _next_level(self, tokens: Tensor) -> Tensor:
        width = tokens.shape[1]
        states, raw = (part.repeat_interleave(width, 0) for part in next(self._of_levels))
        raw, memories = self._network.with_tokens(
            states, raw, tokens.flatten(), self._memories.flatten(0, 1)
        )
        self._memories = memories.unflatten(0, tokens.shape)
        return self._network.logits(raw)


def of_parents(values: Tensor, parents: Tensor) -> Tensor:
    """[R, W, n]: of values [R, W, n] of a level those of the next one's parents, int64 [R, W]."""
    return values.gather(1, parents[..., None].expand(-1, -1, values.shape[-1]))
