"""The grammar process: `python -m draftline.models.text.grammar_worker FD`.

It may be slow, run out of memory or crash in the library without hurting the engine. `grammar.py`
is the other end of the socket FD. Imports neither torch nor transformers: it starts quickly.

llguidance's own reader of a `tokenizer.json` supports few decoders. It fails if ids have gaps, or
if the tokenizer is larger than the model's head. The bytes here are those of the output text
(`TokenBytes`), so a grammar applies to exactly the text that a client reads.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from ...core.errors import RequestError
from .grammar_messages import (
    Close,
    Follow,
    Followed,
    GrammarSetup,
    Started,
    lark_choice,
    lark_regex,
)
from .tokenizer import TokenBytes

# llguidance's mark of special tokens: a byte that no text has.
SPECIAL_MARK = b"\xff"


def grammar_tokenizer(tokenizer: str, size: int, end_ids: Sequence[int]) -> LLTokenizer:
    """The tokens below `size` of a `tokenizer.json`; `end_ids` end every text."""
    vocabulary = GrammarVocabulary(tokenizer, size, end_ids[0])
    made = LLTokenizer(cast("Any", vocabulary), eos_token=list(end_ids))
    vocabulary.greedy = made
    return made


class GrammarVocabulary:
    """The interface that `LLTokenizer` needs of a Python tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokenizer: str, size: int, end_id: int) -> None:
        self._backend = _for_pieces(Tokenizer.from_str(tokenizer))
        self.eos_token_id = end_id
        self.tokens = _tokens(self._backend, size)
        # Spells what the tokenizer itself does not spell as it stands, token by longest token.
        self.greedy: LLTokenizer | None = None

    def __call__(self, text: str) -> list[int]:
        """Ids of a piece of an answer, as the model would tokenize it."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        # Ids beyond the head write nothing.
        with suppress(IndexError):
            if b"".join(map(self.tokens.__getitem__, ids)) == text.encode():
                return ids
        return [] if self.greedy is None else self.greedy.greedy_tokenize(text)


class _Spelling:
    """The calls of a transformers tokenizer that `TokenBytes` needs."""

    def __init__(self, backend: Tokenizer) -> None:
        self.convert_ids_to_tokens = backend.id_to_token
        self._decoder = backend.decoder

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)


def _tokens(backend: Tokenizer, size: int) -> list[bytes]:
    """The bytes of every id; of special tokens their spelling after a mark; b"" for no token."""
    bytes_of = TokenBytes(cast("Any", _Spelling(backend)))
    tokens = [bytes_of(index) for index in range(size)]
    for index, added in backend.get_added_tokens_decoder().items():
        text = added.content
        # Grammars of clients name such tokens as `<name>`, special or not.
        if index < size and (added.special or (text.startswith("<") and text.endswith(">"))):
            tokens[index] = SPECIAL_MARK + text.encode()
    return tokens


def _for_pieces(backend: Tokenizer) -> Tokenizer:
    """The tokenizer for pieces of a text: they begin with no space, and special tokens are text."""
    backend.encode_special_tokens = True
    backend.no_truncation()
    backend.no_padding()
    before = _parts(backend.normalizer, normalizers.Sequence)
    kept = [part for part in before if not isinstance(part, normalizers.Prepend)]
    if len(kept) < len(before):
        backend.normalizer = normalizers.Sequence(kept)
    for part in _parts(backend.pre_tokenizer, pre_tokenizers.Sequence):
        if isinstance(part, pre_tokenizers.Metaspace):
            part.prepend_scheme = "never"
        elif isinstance(part, pre_tokenizers.ByteLevel):
            part.add_prefix_space = False
    return backend


def _parts(whole: Any, sequence: type) -> list[Any]:
    """A normalizer or pre-tokenizer, or those that it is a sequence of."""
    if not isinstance(whole, sequence):
        return [] if whole is None else [whole]
    return [part for each in cast("Any", whole) for part in _parts(each, sequence)]


FIELD = "structured_outputs"
# Longest message of llguidance that is passed on.
MAX_MESSAGE_LEN = 400
# Time limit for the nodes of one tree; the rest is dropped, so that the root's mask is not late.
TREE_BUDGET_S = 0.05
# A grammar that needs more is ambiguous beyond use: the time of a mask grows with the square of a
# row's items, and a state takes up to 2 kB. Error messages must not quote the grammar.
LIMITS = LLParserLimits(max_items_in_row=1000, max_lexer_states=50_000, verbose_errors=False)


class Matcher:
    """State of one structured output in its answer. Raises `RequestError` beyond a limit."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        grammar_of: tuple[str, str],
        vocab_size: int,
        end_ids: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`grammar_of`: the kind and the value of a `StructuredOutput`."""
        kind, value = grammar_of
        grammar = _grammar(kind, value)
        # A grammar that repeats without end or grows too large fails here, within bounds.
        if problem := LLMatcher.validate_grammar(grammar, tokenizer, limits=LIMITS):
            raise _error(kind, problem)
        self._kind = kind
        self._matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
        self._words = -(-vocab_size // 32)
        self._end_ids = frozenset(end_ids)
        self._clock = clock
        self._check()

    def advance(self, token_ids: Sequence[int]) -> None:
        """Follow committed tokens."""
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            raise _error(self._kind, self._matcher.get_error() or "cannot go on")

    def follow(
        self, tokens: Sequence[int], parents: Sequence[int]
    ) -> tuple[list[int], NDArray[np.uint32]]:
        """Rows of a tree that the grammar allows, 0 the root's and i + 1 node i's, and their masks.

        A mask, uint32 [words], is of the tokens allowed after a row. The root comes first.
        """
        children: list[list[int]] = [[] for _ in range(1 + len(tokens))]
        for node, parent in enumerate(parents):
            children[parent + 1].append(node)
        rows: list[int] = []
        masks: list[NDArray[np.uint32]] = []
        deadline = self._clock() + TREE_BUDGET_S
        for row in self._walk(0, children, tokens, deadline):
            mask = np.zeros(self._words, dtype=np.uint32)
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            self._check()
            rows.append(row)
            masks.append(mask)
        return rows, np.stack(masks)

    def _walk(
        self,
        row: int,
        children: Sequence[Sequence[int]],
        tokens: Sequence[int],
        deadline: float,
    ) -> Iterator[int]:
        """Yields the root and every allowed node, with the matcher's state after it."""
        yield row
        for node in children[row]:
            if self._clock() > deadline:
                return
            # Nothing follows the end.
            if tokens[node] in self._end_ids:
                continue
            if self._matcher.try_consume_tokens([tokens[node]]):
                yield from self._walk(node + 1, children, tokens, deadline)
                self._matcher.rollback(1)
            self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise _error(self._kind, self._matcher.get_error())


def _error(kind: str, message: str) -> RequestError:
    # The rest of the message describes the library's state.
    reason = message.partition("<state>")[0].strip()
    return RequestError(FIELD, f"{kind}: {reason[:MAX_MESSAGE_LEN]}")


def _grammar(kind: str, value: str) -> str:
    match kind:
        case "json_object":
            return LLMatcher.grammar_from_json_schema({"type": "object"})
        case "json":
            return LLMatcher.grammar_from_json_schema(_schema(value))
        case "choice":
            return LLMatcher.grammar_from_lark(_choice(_json(value, "choice")))
        case "regex":
            return LLMatcher.grammar_from_lark(f"start: {lark_regex(value)}")
        case "grammar":
            return LLMatcher.grammar_from_lark(value)
    raise AssertionError(kind)


def _json(text: str, kind: str) -> object:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise RequestError(FIELD, f"{kind}: is not valid JSON: {error}") from None


def _schema(text: str) -> dict[str, Any]:
    schema = _json(text, "json")
    if not isinstance(schema, dict):
        raise RequestError(FIELD, "json: must be an object, the schema")
    return schema


def _choice(texts: object) -> str:
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise RequestError(FIELD, "choice: must be a list of texts")
    return f"start: {lark_choice(texts)}"


# Lower priority than the engine and its API, for machines with few cores.
NICENESS = 5
NUM_FOLLOWERS = 2


class Worker:
    """Matchers by grammar, and the threads that use them; a grammar has one call at a time."""

    def __init__(self, setup: GrammarSetup) -> None:
        self._setup = setup
        self._tokenizer = grammar_tokenizer(setup.tokenizer, setup.vocab_size, setup.end_ids)
        self._matchers: dict[int, Matcher] = {}
        self._lock = threading.Lock()

    def follow(self, call: Follow) -> Followed:
        """Answer a call; the first call of a grammar includes its definition."""
        try:
            rows, masks = self._matcher(call).follow(call.tokens, call.parents)
        except RequestError as error:
            return Followed(call.call_id, (), b"", error.message)
        except MemoryError:
            return Followed(call.call_id, (), b"", "takes more memory than there is for forms")
        return Followed(call.call_id, tuple(rows), masks.tobytes(), "")

    def close(self, call: Close) -> None:
        """Free a grammar."""
        with self._lock:
            self._matchers.pop(call.form_id, None)

    def _matcher(self, call: Follow) -> Matcher:
        if call.grammar is not None:
            setup = self._setup
            matcher = Matcher(self._tokenizer, call.grammar, setup.vocab_size, setup.end_ids)
            with self._lock:
                self._matchers[call.form_id] = matcher
        else:
            with self._lock:
                matcher = self._matchers.get(call.form_id)
            if matcher is None:
                raise RequestError(FIELD, "cannot be followed any more")
        matcher.advance(call.committed)
        return matcher


def serve(connection: Connection) -> None:
    """Answer until the other end is closed."""
    setup = connection.recv()
    assert isinstance(setup, GrammarSetup)
    resource.setrlimit(resource.RLIMIT_AS, (setup.memory_bytes, setup.memory_bytes))
    try:
        worker = Worker(setup)
    except ValueError as error:
        connection.send(Started(f"cannot be followed with this model's tokenizer: {error}"))
        return
    connection.send(Started())
    sending = threading.Lock()

    def answer(call: Follow) -> None:
        answered = worker.follow(call)
        with sending:
            connection.send(answered)

    # Preparing a grammar may take seconds; it must not delay the prepared ones.
    openers = ThreadPoolExecutor(1)
    followers = ThreadPoolExecutor(NUM_FOLLOWERS)
    while True:
        call = connection.recv()
        if isinstance(call, Close):
            worker.close(call)
        else:
            (followers if call.grammar is None else openers).submit(answer, call)


def main() -> None:
    """Serve the socket that the command line names until its other end is closed."""
    os.nice(NICENESS)
    with suppress(EOFError, ConnectionError):
        serve(Connection(int(sys.argv[1])))
    # Threads may still be in the library; their results are no longer needed.
    os._exit(0)


if __name__ == "__main__":
    main()
