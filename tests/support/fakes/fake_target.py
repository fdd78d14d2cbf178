"""A target without a model: a distribution over the exact text that a row sees through the KV
cache.

It keeps (token, position) for every slot and moves them as a stage would, so that a wrong slot,
mask, position, move or block table changes its answers or fails an assertion.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable

import numpy as np
from draftline.core.arrays import Float32, Int32
from draftline.core.errors import StageLost
from draftline.core.pipelined.walk import ChunkWalk, PipelinedWalks
from draftline.core.proposals import Proposal, chain_proposal, empty_proposal
from draftline.core.steps import HeadDrafts, StepInput, StepOutput
from draftline.core.tree.tree import unpack
from draftline.core.verify.walk import CommittedRows, accepted_rows, committed_rows


def next_token(tokens: list[int], seed: int, vocab_size: int, memory: int | None = 2) -> int:
    """The target's token after `tokens`: it remembers `memory` of them, or all.

    A short memory lets drafters guess it.
    """
    seen = tokens if memory is None else tokens[-memory:]
    key = repr((seen, seed)).encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=4).digest(), "little") % vocab_size


def top_ids(text: list[int], top_k: int, vocab_size: int) -> Int32:
    """The target's most probable tokens after a text."""
    first = next_token(text, 0, vocab_size)
    return (first + np.arange(top_k, dtype=np.int32)) % vocab_size


def plain_answer(
    prompt: list[int], num_tokens: int, seed: int, vocab_size: int, memory: int | None = 2
) -> list[int]:
    """What plain decoding says."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed, vocab_size, memory))
    return tokens[len(prompt) :]


class FakeTarget:
    """A pipeline of one fake stage."""

    def __init__(
        self,
        vocab_size: int,
        block_size: int,
        max_in_flight: int = 1,
        *,
        memory: int | None = 2,
        turns: Callable[[], int] | None = None,
    ) -> None:
        """`turns`: of the event loop that a step takes; without it each is answered at once."""
        self.memory = memory
        self._turns = turns
        self.most_on_their_way = 0
        self._on_its_way: deque[tuple[int, asyncio.Future[StepOutput], StepOutput]] = deque()
        self.max_in_flight = max_in_flight
        self._vocab_size = vocab_size
        self._block_size = block_size
        self._cache: dict[int, tuple[int, int]] = {}
        # By slot: the token behind the one that stands there, as a head reads it.
        self._behind: dict[int, int] = {}
        self.num_behind = 0
        # By key: the committed text of a pipelined request, and the token behind it.
        self._streamed: dict[int, list[int]] = {}
        self._walks = PipelinedWalks()
        # Drafts behind chunks that go on from others.
        self.num_behind_others = 0
        # How far behind the right one its heads take every request's last row to be.
        self.num_rows_astray = 0
        self.steps: list[StepInput] = []
        self.lost = False

    def submit(self, step: StepInput) -> asyncio.Future[StepOutput]:
        answer: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        if self.lost:
            answer.set_exception(StageLost("stage 0 is dead"))
            return answer
        self.steps.append(step)
        output = self._run(step)
        if self._turns is None:
            answer.set_result(output)
        else:
            self._on_its_way.append((self._turns(), answer, output))
            self.most_on_their_way = max(self.most_on_their_way, len(self._on_its_way))
            assert len(self._on_its_way) <= self.max_in_flight
            if len(self._on_its_way) == 1:
                asyncio.get_running_loop().call_soon(self._turn)
        return answer

    def _turn(self) -> None:
        """Steps are answered in order; the first one's time passes."""
        turns, answer, output = self._on_its_way[0]
        if turns > 0:
            self._on_its_way[0] = turns - 1, answer, output
        else:
            self._on_its_way.popleft()
            if not answer.cancelled():
                answer.set_result(output)
        if self._on_its_way:
            asyncio.get_running_loop().call_soon(self._turn)

    def _run(self, step: StepInput) -> StepOutput:
        moved = [(self._cache[source], target) for source, target in step.moves.tolist()]
        behind = [(self._behind.get(source), target) for source, target in step.moves.tolist()]
        for value, target in moved:
            self._cache[target] = value
        for token, target in behind:
            self._note_behind(target, token)
        self._walks.move(step.moves)
        assert len(set(step.slots.tolist())) == len(step.slots), "two rows write one slot"
        rows = zip(
            step.slots.tolist(), step.token_ids.tolist(), step.positions.tolist(), strict=True
        )
        for slot, token, position in rows:
            self._cache[slot] = (token, position)
            self._note_behind(slot, None)
        texts = [self._visible(step, row) for row in range(len(step.token_ids))]
        wanted = [texts[row] for row in step.logits_rows.tolist()]
        assert [len(text) for text in wanted] == step.sampling.position.tolist()
        targets = self.choose(step, wanted)
        probes = [self._top_ids(texts[row], step.probes.top_k) for row in step.probes.rows.tolist()]
        return StepOutput(
            step_id=step.step_id,
            target_tokens=targets,
            probe_ids=np.array(probes, dtype=np.int32) if probes else None,
            decoded=self._decode(step, wanted, targets) if step.multi_step is not None else None,
            features=self._features(step, targets) if step.heads.feature_requests else None,
            head_drafts=self._head_drafts(step, targets, texts) if step.heads.tasks else (),
        )

    def _features(self, step: StepInput, targets: Int32) -> Float32:
        """Token and position of each committed row."""
        rows = accepted_rows(step, targets)
        values = [self._cache[slot] for slot in step.slots[rows].tolist()]
        return np.array(values, dtype=np.float32).reshape(-1, 2)

    def _note_behind(self, slot: int, token: int | None) -> None:
        self._behind.pop(slot, None)
        if token is not None:
            self._behind[slot] = token

    def _head_drafts(
        self, step: StepInput, targets: Int32, texts: list[list[int]]
    ) -> tuple[HeadDrafts, ...]:
        """What the target will say, a few tokens of it."""
        committed = committed_rows(step, targets)
        for row, token in zip(committed.rows.tolist(), committed.following.tolist(), strict=True):
            self._note_behind(int(step.slots[row]), token)
        (task,) = step.heads.tasks
        num_trees = sum(tree is not None for tree in step.trees)
        num_accepted = np.diff(committed.starts[: num_trees + 1]) - 1
        said = self._said(step, committed, texts)
        walks = {}
        for place in step.heads.chunk_requests:
            walks[place], said[place] = self._walk(step, place, targets, texts)
            num_accepted[place] = len(walks[place].rows) - walks[place].num_known - 1
        at_leaves = [place for place, walk in walks.items() if walk.at_leaf]
        task = task.after(num_accepted.tolist(), at_leaves)
        proposals, lengths = [], []
        for place, max_nodes in zip(task.requests, task.max_nodes, strict=True):
            lengths.append(len(said[place]))
            self._check_behind(step, place, said[place])
            proposals.append(self._draft(step, place, said[place], max_nodes))
            self.num_behind_others += place in walks and walks[place].num_known > 0
        whole = np.delete(np.arange(num_trees), step.heads.chunk_requests)
        last_rows = committed.rows[committed.starts[whole + 1] - 1]
        last_rows -= step.request_starts[whole] - self.num_rows_astray
        drafts = HeadDrafts(task.source, 0.25, tuple(proposals), last_rows)
        return (drafts._replace(texts=tuple(zip(task.requests, lengths, strict=True))),)

    def _said(
        self, step: StepInput, committed: CommittedRows, texts: list[list[int]]
    ) -> dict[int, list[int]]:
        """The committed text of each request that has rows of it, with the token behind."""
        ends = committed.starts[1:].tolist()
        return {
            place: [*texts[committed.rows[end - 1]], int(committed.following[end - 1])]
            for place, end in enumerate(ends)
            if end > committed.starts[place]
        }

    def _walk(
        self, step: StepInput, place: int, targets: Int32, texts: list[list[int]]
    ) -> tuple[ChunkWalk, list[int]]:
        """The walk through a pipelined request's chunk, which texts alone tell, too; and its text
        then, with the token behind it."""
        chosen = {row: index for index, row in enumerate(step.logits_rows.tolist())}
        root, end = step.request_starts[place : place + 2].tolist()
        rows = [row for row in range(root, end) if row in chosen]
        text, walked, first = self._streamed.get(step.request_keys[place], []), [], len(texts[root])
        num_known = max(len(text) - first, 0)
        if not num_known:
            text = [*texts[root], int(targets[chosen[root]])]
        for row in rows:
            if texts[row] == text:
                text, walked = [*text, int(targets[chosen[row]])], [*walked, row]
        self._streamed[step.request_keys[place]] = text
        walk = self._walks.follow(step, place, targets)
        positions = range(first - 1, len(text) - 1)
        expected = zip(text[first - 1 : -1], positions, text[first:], strict=True)
        assert [(*self._cache[slot], token) for slot, _, token in walk.rows] == list(expected)
        assert (walk.num_known, list(walk.walked)) == (num_known, walked)
        is_leaf = len(rows) > 1 and all(texts[row][:-1] != text[:-1] for row in rows)
        assert walk.at_leaf == is_leaf
        return walk, text

    def _check_behind(self, step: StepInput, place: int, text: list[int]) -> None:
        """Each cached token of the text was read with the token behind it.

        Those of a shared prefix may not, and its last one may have been with another.
        """
        for position in range(int(step.context_lens[place])):
            block = int(step.block_tables[place, position // self._block_size])
            token = self._behind.get(block * self._block_size + position % self._block_size)
            is_last = position % self._block_size == self._block_size - 1
            assert token is None or token == text[position + 1] or is_last
            self.num_behind += token == text[position + 1]

    def _draft(self, step: StepInput, place: int, text: list[int], max_nodes: int) -> Proposal:
        if not max_nodes:
            return empty_proposal("ahead")
        row = int(np.searchsorted(step.logits_rows, step.request_starts[place]))
        seed, path = int(step.sampling.seed[row]), list(text)
        for _ in range(min(max_nodes, 3)):
            path.append(next_token(path, seed, self._vocab_size, self.memory))
        return chain_proposal("ahead", np.array(path[len(text) :], dtype=np.int32))

    def _decode(self, step: StepInput, texts: list[list[int]], targets: Int32) -> Int32:
        """The tokens after the roots and after one another, all but the last of them cached."""
        assert len(step.slots) == len(step.logits_rows) == len(step.context_lens)
        assert not step.edits
        assert not step.log_probs.of_targets
        assert not len(step.probes.rows)
        assert step.multi_step is not None
        decoded, end_ids = [targets], step.multi_step.end_ids
        for _ in range(step.multi_step.num_tokens - 1):
            if (np.stack(decoded, 1)[:, :, None] == end_ids[:, None]).any((1, 2)).all():
                break
            last = decoded[-1].tolist()
            for row, (text, token) in enumerate(zip(texts, last, strict=True)):
                position = len(text)
                block = step.block_tables[row, position // self._block_size]
                slot = int(block) * self._block_size + position % self._block_size
                self._cache[slot] = (token, position)
                text.append(token)
            decoded.append(self.choose(step, texts))
        return np.stack(decoded, axis=1)

    def choose(self, step: StepInput, texts: list[list[int]]) -> Int32:
        """The token after each text."""
        pairs = zip(texts, step.sampling.seed.tolist(), strict=True)
        tokens = [next_token(text, seed, self._vocab_size, self.memory) for text, seed in pairs]
        return np.array(tokens, dtype=np.int32)

    def _top_ids(self, text: list[int], top_k: int) -> Int32:
        return top_ids(text, top_k, self._vocab_size)

    def _visible(self, step: StepInput, row: int) -> list[int]:
        """The text up to and with this row, read through the cache; positions must be gapless."""
        request = int(np.searchsorted(step.request_starts, row, side="right")) - 1
        own = row - int(step.request_starts[request])
        positions = np.arange(int(step.context_lens[request]))
        table = step.block_tables[request]
        slots = table[positions // self._block_size] * self._block_size
        seen = [self._cache[s] for s in (slots + positions % self._block_size).tolist()]
        assert [position for _, position in seen] == positions.tolist(), "context is not committed"
        tree = step.trees[request]
        if tree is None:
            first = int(step.request_starts[request])
            columns = step.slots[first : row + 1].tolist()
        else:
            mask = unpack(tree.ancestors, len(tree.slots))
            assert np.array_equal(tree.slots[-len(mask) :][own], step.slots[row])
            columns = tree.slots[mask[own]].tolist()
        seen += [self._cache[slot] for slot in columns]
        seen.sort(key=lambda value: value[1])
        assert [position for _, position in seen] == list(range(int(step.positions[row]) + 1))
        return [token for token, _ in seen]
