"""What drafters ask of the target beside their trees, from a proposal to the output.

A proposal may bring a `Probe`, rows that the target computes for the drafter and never commits
(SPECTRA's pool, lookahead). It may also ask for the most probable next tokens after the rows of the
request's tree (token recycling). The policy chooses whose probes go into a step
(`core/speculation/probe_trials.py`). Rows of probes stand behind those of their request's tree.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from ..arrays import Int32, UInt64
from ..proposals import Proposal, TopNextTokens
from ..steps import NO_PROBES, NO_ROWS, WORD_BITS, ProbeInput, StepOutput
from ..tree.tree import pack, unpack, with_masks
from .parts import TreeExtras, TreeStep, TreeSteps


def wants_extras(proposals: Sequence[Proposal]) -> bool:
    """Whether any of the proposals asks for more than its nodes; few do."""
    return any(p.probe is not None or p.num_top_next_tokens for p in proposals)


def extras_of(
    proposals: Sequence[Proposal], max_rows: int, sources: Collection[str] | None = None
) -> TreeExtras:
    """What the proposals for a request ask for beside its tree.

    max_rows  of all probes together; what does not fit is left out, in the order of the proposals
    sources   drafters whose probes go into the step; None: all
    """
    probes = {}
    for proposal in proposals:
        probe = proposal.probe
        if probe is None or (sources is not None and proposal.source not in sources):
            continue
        if len(probe.tokens) <= max_rows:
            probes[proposal.source] = probe
            max_rows -= len(probe.tokens)
    tops = {p.source: p.num_top_next_tokens for p in proposals if p.num_top_next_tokens}
    return TreeExtras(probes, tops)


def probe_rows(trees: TreeSteps) -> tuple[Int32, Int32, Int32]:
    """Tokens and offsets of all probe rows, and how many each request has, int32 [requests]."""
    counts = np.zeros(len(trees), dtype=np.int32)
    if not trees.extras:
        return NO_ROWS, NO_ROWS, counts
    probes = []
    for index, extras in sorted(trees.extras.items()):
        probes += extras.probes.values()
        counts[index] = extras.num_probe_rows
    tokens = np.concatenate([NO_ROWS, *(probe.tokens for probe in probes)])
    return tokens, np.concatenate([NO_ROWS, *(probe.offsets for probe in probes)]), counts


def ancestors_of(trees: TreeSteps) -> UInt64:
    """The bits of all trees with their probe rows, one behind the other."""
    ancestors = trees.trees.ancestors()
    if not any(extras.probes for extras in trees.extras.values()):
        return ancestors
    sizes = trees.trees.sizes + 1
    bits = np.split(ancestors, (sizes * -(-sizes // WORD_BITS)).cumsum()[:-1])
    for index, extras in trees.extras.items():
        if extras.probes:
            # Rows of probes see the root and their own probe.
            tree = unpack(bits[index].reshape(sizes[index], -1), int(sizes[index]))
            masks = [probe.mask for probe in extras.probes.values()]
            bits[index] = pack(with_masks(tree, 0, masks)).ravel()
    return np.concatenate(bits)


def probe_input(trees: TreeSteps, starts: Int32) -> ProbeInput:
    """The rows of a step whose most probable next tokens are wanted.

    starts: int32 [requests]  first row of each
    """
    wanted, top_k = list[Int32](), 0
    for index, extras in sorted(trees.extras.items()):
        start = int(starts[index])
        first = start + trees.part(index).num_chosen
        if extras.num_top_next_tokens:
            wanted.append(np.arange(start, first, dtype=np.int32))
        for probe in extras.probes.values():
            wanted.append(probe.wanted + np.int32(first))
            first += len(probe.tokens)
        counts = *extras.num_top_next_tokens.values(), *(p.top_k for p in extras.probes.values())
        top_k = max(top_k, *counts, 0)
    return ProbeInput(np.concatenate(wanted), top_k) if wanted else NO_PROBES


class ProbeReader:
    """Takes a step's most probable next tokens, tree by tree, as `probe_input` asked for them."""

    __slots__ = ("_next", "_output")

    def __init__(self, output: StepOutput) -> None:
        self._output = output
        self._next = 0

    def of_tree(self, step: TreeStep) -> tuple[dict[str, Int32], dict[str, TopNextTokens]]:
        """The next tokens after rows of probes, and after the root and each node, by source.

        To be called before the commit: the request's last token is the root.
        """
        extras, tops = step.extras, dict[str, TopNextTokens]()
        if extras.num_top_next_tokens:
            tokens = np.append(np.int32(step.root_token), step.tree.tokens)
            ids = self._take(len(tokens))
            for source, count in extras.num_top_next_tokens.items():
                tops[source] = TopNextTokens(tokens, ids[:, :count])
        probe_ids = {
            source: self._take(len(probe.wanted))[:, : probe.top_k]
            for source, probe in extras.probes.items()
        }
        return probe_ids, tops

    def _take(self, count: int) -> Int32:
        first, self._next = self._next, self._next + count
        assert self._output.probe_ids is not None, "the stage did not do what it was asked"
        return self._output.probe_ids[first : self._next]
