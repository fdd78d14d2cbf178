"""Cuts a step's output into those of its requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..arrays import Int32
from ..proposals import TopNextTokens
from ..request.chosen import Chosen, token_log_prob
from ..steps import StepOutput
from .prompt_chunk import PromptChunk
from .tree_steps import TreeStep, TreeSteps


class TreeOutput(NamedTuple):
    """What a step answered to a request's tree.

    chosen           after the root and each node
    probe_ids        the answers to probes, by source
    top_next_tokens  of the root and the nodes, in this order, by source
    """

    chosen: Chosen
    probe_ids: Mapping[str, Int32]
    top_next_tokens: Mapping[str, TopNextTokens]

    def behind(self, unheard: Mapping[str, TopNextTokens]) -> TreeOutput:
        """With the next tokens that earlier slices of the tree were answered."""
        if not unheard:
            return self
        joined = dict(unheard)
        for source, own in self.top_next_tokens.items():
            joined[source] = own.behind(unheard[source]) if source in unheard else own
        return self._replace(top_next_tokens=joined)


# Of a tree of which nobody wants to know more than its walk says.
NO_TREE_OUTPUT = TreeOutput(Chosen(np.empty(0, dtype=np.int32), None, None), {}, {})


class StepOutputReader:
    """Takes the answers in the order in which `build_step` asked."""

    __slots__ = ("_next_chosen", "_next_probe", "_next_scored", "_output")

    def __init__(self, output: StepOutput) -> None:
        self._output = output
        self._next_chosen = self._next_probe = self._next_scored = 0

    def of_trees(self, steps: TreeSteps) -> list[TreeOutput]:
        """`of_tree` for all; where nobody wants more than the walks, nothing."""
        if self._output.log_probs is not None or steps.wishes:
            return [self.of_tree(step) for step in steps]
        self._next_chosen = len(steps) + len(steps.trees.nodes)
        return [NO_TREE_OUTPUT] * len(steps)

    def of_tree(self, step: TreeStep) -> TreeOutput:
        """What was chosen after the root and each node, and what drafters asked for.

        To be called before the commit: the request's last token is the root.
        """
        top_next_tokens = self._top_next_tokens(step) if step.wishes.num_top_next_tokens else {}
        probe_ids = self._probe_ids(step)
        return TreeOutput(self._chosen(step.num_chosen), probe_ids, top_next_tokens)

    def of_chunk(self, chunk: PromptChunk) -> Chosen:
        """What was chosen after the chunk, if it asked; keeps its tokens' log-probabilities."""
        state = chunk.state
        if state.prompt_log_probs is not None and chunk.num_scored:
            first = self._next_scored
            self._next_scored += chunk.num_scored
            num_top = state.request.params.prompt_logprobs or 0
            scores, top = self._output.scores, self._output.scored_top
            for index in range(chunk.num_scored):
                position = chunk.start + index + 1
                token = int(state.request.prompt_ids[position])
                log_prob = token_log_prob(token, scores, top, first + index, num_top)
                state.prompt_log_probs[position] = log_prob
        return self._chosen(int(chunk.wants_token))

    def _probe_ids(self, step: TreeStep) -> dict[str, Int32]:
        return {
            source: self._best_ids(len(probe.wanted))[:, : probe.top_k]
            for source, probe in step.wishes.probes.items()
        }

    def _top_next_tokens(self, step: TreeStep) -> dict[str, TopNextTokens]:
        tokens = np.append(np.int32(step.root_token), step.tree.tokens)
        ids = self._best_ids(len(tokens))
        return {
            source: TopNextTokens(tokens, ids[:, :count])
            for source, count in step.wishes.num_top_next_tokens.items()
        }

    def _best_ids(self, count: int) -> Int32:
        first, self._next_probe = self._next_probe, self._next_probe + count
        return self._output.probe_ids[first : self._next_probe]

    def _chosen(self, count: int) -> Chosen:
        first, self._next_chosen = self._next_chosen, self._next_chosen + count
        return Chosen.of_rows(self._output, slice(first, first + count))
