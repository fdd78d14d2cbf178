"""Forms that are late or fail: their requests wait or end, and the others go on as ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import pytest
from draftline.core import engine
from draftline.core.arrays import ROOT, UInt32
from draftline.core.errors import RequestError
from draftline.core.request.allowed_tokens import AllowedTokens, GrammarMasks, full_mask, rows_in
from draftline.core.request.request import Request
from draftline.core.request.sampling_params import SamplingParams
from draftline.core.request.stop import StopRule
from draftline.core.tree.tree import TokenTree
from support.fakes.fake_bench import Bench, NoText
from support.fakes.fake_target import plain_answer
from support.inputs.trees import tree_of

VOCAB = 7
EVERY = full_mask(VOCAB)


class Form:
    """Allows everything; answers when told, or fails."""

    def __init__(self, *, late: bool = False, fails_at: int = 10**9) -> None:
        self.first: UInt32 = EVERY
        self.committed: list[int] = []
        self.closed = False
        self.waiting: list[tuple[Future[GrammarMasks], TokenTree]] = []
        self._late = late
        self._fails_at = fails_at

    def follow(self, tree: TokenTree) -> Future[GrammarMasks]:
        answer: Future[GrammarMasks] = Future()
        self.waiting.append((answer, tree))
        if not self._late:
            self.answer()
        return answer

    def answer(self) -> None:
        for answer, tree in self.waiting:
            self._fails_at -= 1
            if self._fails_at < 0:
                answer.set_exception(RequestError("structured_outputs", "takes too much"))
            else:
                masks = np.repeat(EVERY[None], 1 + len(tree), axis=0)
                answer.set_result(GrammarMasks(np.ones(len(tree), dtype=np.bool_), masks))
        self.waiting.clear()

    def advance(self, token_ids: Sequence[int]) -> None:
        self.committed += token_ids

    def close(self) -> None:
        self.closed = True


def add(bench: Bench, name: str, form: Form | None, max_tokens: int = 40) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    rules = None if form is None else AllowedTokens(None, None, 0, form)
    prompt = np.array([1, 2, 3], dtype=np.int32)
    sink = bench.heard.setdefault(name, []).append
    request = Request(name, prompt, params, len(name), max_tokens, sink, allowed_tokens=rules)
    bench.core.add(request, StopRule(params, (), max_tokens, NoText()))


def assert_whole(bench: Bench, *names: str) -> None:
    for name in names:
        assert bench.tokens(name) == plain_answer([1, 2, 3], 40, len(name), VOCAB)


async def test_a_form_in_time_changes_no_text_and_hears_of_every_token() -> None:
    bench, form = Bench(num_groups=2, seed=4), Form()
    add(bench, "a", form)
    add(bench, "bb", None)
    await bench.run()
    assert_whole(bench, "a", "bb")
    # The last tokens end the request, and its form with it.
    assert bench.tokens("a")[: len(form.committed)] == form.committed
    assert form.committed
    assert form.closed
    bench.check_empty()


async def test_whoever_has_a_late_form_waits_alone() -> None:
    bench, form = Bench(num_groups=2, seed=5), Form(late=True)
    add(bench, "a", form)
    add(bench, "bb", None)
    add(bench, "ccc", None)
    for _ in range(60):
        await bench.core.step()
    assert_whole(bench, "bb", "ccc")
    assert len(bench.tokens("a")) == 1
    while bench.core.has_work:
        form.answer()
        await bench.core.step()
    assert_whole(bench, "a")
    bench.check_empty()


async def test_a_form_that_fails_ends_its_request() -> None:
    bench, form = Bench(seed=6), Form(fails_at=3)
    add(bench, "a", form)
    add(bench, "bb", None)
    await bench.run()
    assert_whole(bench, "bb")
    error = bench.heard["a"][-1]
    assert isinstance(error, RequestError)
    assert error.field == "structured_outputs"
    assert form.closed
    bench.check_empty()


async def test_a_request_that_is_cancelled_while_its_form_is_late_leaves_nothing() -> None:
    bench, form = Bench(seed=7), Form(late=True)
    add(bench, "a", form)
    for _ in range(5):
        await bench.core.step()
    assert form.waiting
    bench.core.cancel("a")
    assert form.closed
    bench.check_empty()
    add(bench, "bb", None)
    await bench.run()
    assert_whole(bench, "bb")


async def test_an_engine_with_late_forms_alone_does_not_spin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its step ends with a form's answer, as long as the wait for one may last."""
    bench, form = Bench(seed=8), Form(late=True)
    add(bench, "a", form)
    for _ in range(3):
        await bench.core.step()
    monkeypatch.setattr(engine, "IDLE_WAIT_S", 3600.0)
    step = asyncio.create_task(bench.core.step())
    _, waiting = await asyncio.wait({step}, timeout=0.05)
    assert waiting == {step}
    form.answer()
    await step
    assert not form.waiting


def test_rows_of_a_cut_tree() -> None:
    whole = tree_of([5, 6, 7, 5], [ROOT, 0, ROOT, 2])
    assert rows_in(whole, whole) == [0, 1, 2, 3, 4]
    cut = whole.keep(np.array([True, False, True, True]))
    assert rows_in(cut, whole) == [0, 1, 3, 4]
