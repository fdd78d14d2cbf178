"""Structured outputs: which tokens a grammar allows, computed in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from transformers import PreTrainedTokenizerBase

from ...core.arrays import UInt32
from ...core.errors import RequestError
from ...core.request.allowed_tokens import GrammarMasks, StructuredOutput
from ...core.tree.tree import NO_TREE, TokenTree
from .grammar_messages import GrammarSetup
from .grammar_process import GrammarProcess, RequestGrammar

# Memory of the process that handles all grammars of an engine.
MEMORY_BYTES = 8 << 30


class GrammarFactory:
    """Makes constraints for one model. The process behind them starts with the first one."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(index for index in eos_token_ids if index < vocab_size)
        self.process = GrammarProcess(self._setup)

    def constraint(self, output: StructuredOutput) -> Future[GrammarConstraint]:
        """A constraint at the start of an answer. Does not wait.

        This call or the future raises `RequestError`. Cancelling the future drops the constraint.
        """
        if not self._eos_token_ids or getattr(self._tokenizer, "backend_tokenizer", None) is None:
            missing = "fast tokenizer" if self._eos_token_ids else "end-of-sequence token"
            raise RequestError(output.field, f"this model has no {missing}, which it needs")
        form = self.process.new_form(output)
        made: Future[GrammarConstraint] = Future()
        first = self.process.follow(form, NO_TREE)
        first.add_done_callback(partial(_make, self.process, form, made))
        return made

    def close(self) -> None:
        """End the process; constraints fail from now on."""
        self.process.close()

    def _setup(self) -> GrammarSetup:
        tokenizer = getattr(self._tokenizer, "backend_tokenizer").to_str()  # noqa: B009
        return GrammarSetup(tokenizer, self._vocab_size, self._eos_token_ids, MEMORY_BYTES)


class GrammarConstraint:
    """Implements `Constraint` (`core/request/allowed_tokens.py`) over the grammar process."""

    def __init__(self, process: GrammarProcess, form: RequestGrammar, first: UInt32) -> None:
        self._process = process
        self._form = form
        self.first = first

    def follow(self, tree: TokenTree) -> Future[GrammarMasks]:
        """The nodes of `tree` that the grammar allows, and their token masks. Does not wait."""
        return self._process.follow(self._form, tree)

    def advance(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens to the answer."""
        self._form.committed += token_ids

    def close(self) -> None:
        """Free the grammar in the process."""
        self._process.forget(self._form)


def _make(
    process: GrammarProcess,
    form: RequestGrammar,
    made: Future[GrammarConstraint],
    first: Future[GrammarMasks],
) -> None:
    """Complete `made` with the constraint after the grammar's first mask, or with the error of the
    grammar."""
    error = first.exception()
    if not made.set_running_or_notify_cancel() or error is not None:
        process.forget(form)
    if made.cancelled():
        return
    if error is None:
        made.set_result(GrammarConstraint(process, form, first.result().masks[0]))
    else:
        made.set_exception(error)
