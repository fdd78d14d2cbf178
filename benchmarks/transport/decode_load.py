"""Decode steps of many requests as an engine makes them: trees, KV blocks, penalties, grammars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from ...core.arrays import UInt32
from ...core.errors import Contained
from ...core.proposals import chain_proposal
from ...core.request.allowed_tokens import AllowedTokens, num_words
from ...core.request.constraint import TreeForm
from ...core.request.request import Request, RequestState
from ...core.request.sampling_params import SamplingParams
from ...core.request.stop import StopRule
from ...core.step.builder import build_step
from ...core.step.edits import edits_of_parts
from ...core.step.tree_steps import TreeSteps, TreeWishes
from ...core.steps import StepInput
from ...core.tree.merge import merge_all
from ...core.tree.tree import TokenTree

BLOCK_SIZE = 16
VOCAB_SIZE = 128_000
# Distinct masks of a grammar that the requests share: a row gets one of them by chance.
NUM_MASKS = 64
# Tokens that a step commits.
NUM_COMMITTED = 3


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests that decode side by side, each with a tree of `num_nodes` behind its context."""

    num_requests: int
    num_nodes: int
    context_len: int
    penalties: bool = False
    grammar: bool = False

    @property
    def name(self) -> str:
        """A name for tables."""
        size = f"{self.num_requests}x{self.num_nodes} at {self.context_len // 1024}k"
        return size + ", penalties" * self.penalties + ", grammar" * self.grammar


class _NoText:
    """A stream of tokens that have no text."""

    def push(self, token_id: int) -> str:  # noqa: ARG002
        return ""

    def flush(self) -> str:
        return ""


class _Form:
    """A constraint whose masks the load makes itself."""

    def __init__(self, first: UInt32) -> None:
        self.first = first

    def follow(self, tree: TokenTree) -> Future[TreeForm]:
        raise AssertionError(f"the load has forms of its own, and none for {tree}")

    def advance(self, token_ids: Sequence[int]) -> None:
        pass

    def close(self) -> None:
        pass


class DecodeLoad:
    """Requests that go on by some tokens a step; what is drawn does not depend on how it is sent.

    `advance` does what an engine does between two steps, `build` makes the next step.
    """

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self._scenario = scenario
        self._rng = np.random.default_rng(seed)
        self._masks = self._rng.integers(
            0, 1 << 32, (NUM_MASKS, num_words(VOCAB_SIZE)), dtype=np.uint32
        )
        self._num_blocks = 0
        self._states = [self._state(index) for index in range(scenario.num_requests)]
        self._num_steps = 0
        self.advance()

    def advance(self) -> None:
        """Commit some tokens of every request, take the blocks of its next tree, and draw it."""
        for state in self._states:
            state.append(self._tokens(NUM_COMMITTED).tolist())
            needed = -(-(len(state.token_ids) + self._scenario.num_nodes) // BLOCK_SIZE)
            missing = needed - len(state.blocks)
            if missing > 0:
                state.take_blocks(self._blocks(missing))
            elif missing < 0:
                state.drop_blocks(-missing)
        num_nodes = self._scenario.num_nodes
        limits = [num_nodes] * len(self._states)
        # Two chains, so that a tree has a fork.
        tokens = [np.array_split(self._tokens(num_nodes), 2) for _ in self._states]
        trees = merge_all(
            [[chain_proposal("a", t) for t in both] for both in tokens], limits, limits
        )
        self._trees = TreeSteps(self._states, trees, trees, self._wishes(trees))

    def build(self) -> StepInput:
        """The step of all requests, as the engine builds it."""
        trees, chunks, edits = edits_of_parts(
            self._trees, (), lambda state: Contained(state.request_id, _raise)
        )
        self._num_steps += 1
        return build_step(self._num_steps, chunks, trees, BLOCK_SIZE, edits)

    def _wishes(self, trees: Sequence[TokenTree]) -> Mapping[int, TreeWishes]:
        if not self._scenario.grammar:
            return {}
        return {
            place: TreeWishes(form=self._masks[self._rng.integers(0, NUM_MASKS, 1 + len(tree))])
            for place, tree in enumerate(trees)
        }

    def _state(self, index: int) -> RequestState:
        penalty = 0.2 if self._scenario.penalties else 0.0
        params = SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=penalty)
        allowed = AllowedTokens(None, None, 0, _Form(self._masks[0]))
        request = Request(
            str(index), self._tokens(self._scenario.context_len), params, index, 1 << 20,
            lambda _: None, allowed_tokens=allowed if self._scenario.grammar else None,
        )  # fmt: skip
        state = RequestState(request, StopRule(params, (), 1 << 20, _NoText()), [], 0.0)
        state.begin(index, self._blocks(-(-self._scenario.context_len // BLOCK_SIZE)), 0)
        return state

    def _blocks(self, count: int) -> list[int]:
        first, self._num_blocks = self._num_blocks, self._num_blocks + count
        return list(range(first, first + count))

    def _tokens(self, count: int) -> np.ndarray:
        """Some are frequent and most are rare, as in texts."""
        return (self._rng.zipf(1.2, count) % VOCAB_SIZE).astype(np.int32)


def _raise(error: Exception) -> None:
    raise error
