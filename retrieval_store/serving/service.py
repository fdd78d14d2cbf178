"""Serves lookups from memory while the store behind it changes, fails or recovers."""

from __future__ import annotations

import logging
import random
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from ...core.arrays import Int32
from ...core.errors import DamagedError, StoreError
from ...core.interfaces import Ended, Subtree
from ..delta.damage import StoreWatch
from ..learning import LiveLearning
from ..search.lookup import LookupRule, SegmentLookup
from ..segment.segment import Segment
from ..store import Manifest, SegmentStore

logger = logging.getLogger(__name__)

# Longest wait after failures.
MAX_RETRY_SECONDS = 5.0

T = TypeVar("T")
# Seconds between two reads of a store that learns, and between two checks for folds that are due.
REFRESH_PAUSE_S = 0.2
FOLD_PAUSE_S = 2.0
# Seconds until a refused segment is loaded again.
RETRY_PAUSE_S = 5.0
Held = dict[tuple[str, str], Segment]
Refused = dict[tuple[str, str], StoreError]


def start_repeating(
    owner: T,
    action: Callable[[T], None],
    *,
    name: str,
    stopped: threading.Event,
    first_retry: float,
) -> threading.Thread:
    """A daemon thread that calls `action` with `owner`; it keeps a reference only during the call.

    name         of the thread, and in the log
    stopped      ends it
    first_retry  seconds; the pause after a failure is at most twice that, and doubles with each
    """
    arguments = (weakref.ref(owner), action, name, stopped, first_retry)
    thread = threading.Thread(target=_repeat, args=arguments, name=name, daemon=True)
    thread.start()
    return thread


def _repeat(
    owner: Callable[[], T | None],
    action: Callable[[T], None],
    name: str,
    stopped: threading.Event,
    first_retry: float,
) -> None:
    failures = 0
    while not stopped.is_set() and (held := owner()) is not None:
        try:
            action(held)
            if failures:
                logger.info("event=%s_back", name)
            failures = 0
        except Exception as error:
            # Any failure is retried; consecutive failures are logged once.
            level = logging.DEBUG if failures else logging.WARNING
            expected = isinstance(error, StoreError)
            logger.log(level, "event=%s_failed %s", name, error, exc_info=not expected)
            failures += 1
        del held
        if failures:
            # Full jitter, so that replicas do not come back all at once.
            ceiling = min(MAX_RETRY_SECONDS, first_retry * 2 ** min(failures, 8))
            stopped.wait(random.uniform(0.0, ceiling))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """One moment of a `RetrievalService`.

    version       of the manifest being served; empty while none is served as a whole
    num_segments  segments in memory
    num_bytes     their bytes
    refused       "<namespace>/<id>" of listed segments that are not served: out of reach,
                  corrupt, or of another model
    num_refusals  how often a segment was refused since the start
    num_failures  refreshes that failed in a row; 0 while the store is followed
    last_error    the last of them; empty while the store is followed
    num_damaged   entries of logs, and learned texts, that were passed over as damaged
    is_lost       the store has lost its data: the old content is still served, and nothing is
                  learned
    """

    version: str = ""
    num_segments: int = 0
    num_bytes: int = 0
    refused: tuple[str, ...] = ()
    num_refusals: int = 0
    num_failures: int = 0
    last_error: str = ""
    num_damaged: int = 0
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Tokenizer and vocabulary that every segment must be built for; None is not checked."""

    tokenizer_hash: str | None = None
    vocab_size: int | None = None


class RetrievalService:
    """Implements `core.interfaces.Lookup` over a store, always from memory.

    `refresh` loads changes and then replaces the lookup atomically, so lookups never wait. `start`
    runs it in a thread whenever the store changes. While the store is out of reach, or has lost its
    data, the last loaded content stays in service. So does a namespace's old content while no
    segment of its new one can be loaded. With `learning`, recently learned texts are served, too,
    and a second thread folds them.
    """

    def __init__(
        self,
        store: SegmentStore,
        expected: Expected | None = None,
        poll_seconds: float = 1.0,
        *,
        learning: LiveLearning | None = None,
        rule: LookupRule | None = None,
    ) -> None:
        self._store = store
        self._rule = rule
        self._expected = expected or Expected()
        self._poll_seconds = poll_seconds
        self._manifest: Manifest | None = None
        self._learning = learning
        self._watched = StoreWatch(store) if learning is None else learning.watch
        self._held: Held = {}
        self._refused: Refused = {}
        self._retry_at = 0.0
        self._num_refusals = 0
        self._num_failures = 0
        self._last_error = ""
        self._learned: Mapping[str, Segment] = {}
        self._lookup = SegmentLookup({}, rule)
        self._refreshing = threading.Lock()
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        # Without a call of `stop`, garbage collection still ends the threads and connections.
        self._release = weakref.finalize(self, _release, self._stopped, store, learning)

    @property
    def version(self) -> str:
        """Version of the manifest being served; empty while none is served as a whole."""
        return "" if self._manifest is None else self._manifest.version

    @property
    def status(self) -> ServiceStatus:
        """The state of the service and of its store at this moment."""
        held = self._held
        return ServiceStatus(
            version=self.version,
            num_segments=len(held),
            num_bytes=sum(len(segment.data) for segment in held.values()),
            refused=tuple("/".join(key) for key in self._refused),
            num_refusals=self._num_refusals,
            num_failures=self._num_failures,
            last_error=self._last_error,
            num_damaged=0 if self._learning is None else self._learning.num_damaged,
            is_lost=self._watched.is_lost,
        )

    def lookup(
        self, contexts: Sequence[Int32], namespaces: Sequence[str], max_nodes: Sequence[int]
    ) -> list[Subtree]:
        """One subtree a context, in order; never touches the store."""
        return self._lookup.lookup(contexts, namespaces, max_nodes)

    def refresh(self) -> bool:
        """Serve what the store holds now; True if that changed anything.

        Raises `StoreError`, and keeps serving the old content, if the store is out of reach or has
        lost its data. Also raises it, after all other changes were applied, if a segment could not
        be loaded or was built for another tokenizer, model or vocabulary. A damaged segment affects
        only its own namespace; `status` lists it. The next call tries these segments again.
        """
        changed, failure = self._refresh(patient=False)
        if failure is not None and not isinstance(failure, DamagedError):
            raise failure
        return changed

    def learn(self, ended: Ended) -> Mapping[str, int]:
        """Learn an ended request; returns its outcomes, see `LiveLearning.learn`.

        Blocks for some round trips to the store; does nothing without `learning`. Raises
        `StoreError` if the store is out of reach or has lost its data.
        """
        return {} if self._learning is None else self._learning.learn(ended)

    def start(self) -> None:
        """Follow the store in a thread until `stop`, or until this object is garbage-collected.

        Returns before anything is loaded.
        """
        self._repeat(RetrievalService._watch, "retrieval_store")
        if self._learning is not None:
            self._repeat(RetrievalService._fold, "retrieval_fold")

    def stop(self) -> None:
        """End the threads (at most `poll_seconds` and a store timeout) and close the store."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._release()

    def _refresh(self, *, patient: bool) -> tuple[bool, StoreError | None]:
        """Whether anything changed, and why a segment was refused."""
        with self._refreshing:
            try:
                changed = self._follow(patient=patient)
            except StoreError as error:
                self._note(error)
                raise
            failures = list(self._refused.values())
            # Damaged entries are reported last.
            failures.sort(key=lambda error: isinstance(error, DamagedError))
            failure = failures[0] if failures else None
            self._note(failure)
            return changed, failure

    def _note(self, failure: StoreError | None) -> None:
        self._num_failures = 0 if failure is None else self._num_failures + 1
        self._last_error = "" if failure is None else str(failure)

    def _follow(self, *, patient: bool) -> bool:
        # Read before the manifest: a text folded between the two reads is then present twice, never
        # missing.
        learned, unread = self._read_learned()
        manifest = self._watched.look()
        is_same = self._manifest is not None and manifest.version == self._manifest.version
        if not is_same or learned is not self._learned:
            self._take_over(manifest, learned, patient=patient)
            is_same = False
        if unread is not None:
            raise unread
        return not is_same

    def _take_over(
        self, manifest: Manifest, learned: Mapping[str, Segment], *, patient: bool
    ) -> None:
        held, refused = self._load_all(manifest, patient=patient)
        grouped: dict[str, list[Segment]] = {}
        for (namespace, _), segment in held.items():
            grouped.setdefault(namespace, []).append(segment)
        for namespace, segment in learned.items():
            grouped.setdefault(namespace, []).append(segment)
        self._lookup = SegmentLookup(grouped, self._rule)
        self._held, self._refused, self._learned = held, refused, learned
        # Without a manifest, the next call loads again, even if the store returns to an older
        # state.
        self._manifest = None if refused else manifest

    def _read_learned(self) -> tuple[Mapping[str, Segment], StoreError | None]:
        """The recently learned texts, and why some of them could not be read."""
        if self._learning is None:
            return self._learned, None
        unread = None
        try:
            self._learning.refresh()
        except StoreError as error:
            unread = error
        return self._learning.segments, unread

    def _load_all(self, manifest: Manifest, *, patient: bool) -> tuple[Held, Refused]:
        """The segments to serve, and the listed ones that could not be loaded.

        patient  do not load a segment again that was refused recently
        """
        held: Held = {}
        refused: Refused = {}
        now = time.monotonic()
        waits = patient and now < self._retry_at
        if not waits:
            self._retry_at = now + RETRY_PAUSE_S
        for namespace in sorted(manifest.sizes):
            loaded: Held = {}
            for segment_id in manifest.segment_ids(namespace):
                key = (namespace, segment_id)
                result = self._refused.get(key) if waits else None
                result = result or self._held.get(key) or self._load(namespace, segment_id)
                if isinstance(result, Segment):
                    loaded[key] = result
                else:
                    refused[key] = result
            if not loaded and manifest.sizes[namespace]:
                loaded = {key: old for key, old in self._held.items() if key[0] == namespace}
            held |= loaded
        self._keep_unreadable(manifest, held, refused)
        return held, refused

    def _keep_unreadable(self, manifest: Manifest, held: Held, refused: Refused) -> None:
        """Keep serving the segments that damaged manifest entries may have named."""
        for name, error in manifest.damaged.items():
            namespace, _, segment_id = name.partition("/")
            key = (namespace, segment_id)
            refused[key] = self._refused.get(key, error)
            if key not in self._refused:
                self._count_refusal(key, error)
            if key in self._held:
                held[key] = self._held[key]

    def _count_refusal(self, key: tuple[str, str], error: StoreError) -> None:
        self._num_refusals += 1
        # It is retried at every refresh, but logged once.
        level = logging.DEBUG if key in self._refused else logging.WARNING
        logger.log(level, "event=retrieval_segment_refused segment=%s %s", "/".join(key), error)

    def _load(self, namespace: str, segment_id: str) -> Segment | StoreError:
        """A segment, or the reason for its refusal."""
        try:
            segment = self._store.get(namespace, segment_id)
            segment.require(f"{self._store.url} {namespace}/{segment_id}", **asdict(self._expected))
        except StoreError as error:
            self._count_refusal((namespace, segment_id), error)
            return error
        return segment

    def _repeat(self, action: Callable[[RetrievalService], None], name: str) -> None:
        thread = start_repeating(
            self, action, name=name, stopped=self._stopped, first_retry=self._poll_seconds
        )
        self._threads.append(thread)

    def _watch(self) -> None:
        self._store.wait_for_change(self._poll_seconds)
        before = self.version
        # Refused segments were reported; they do not delay other changes.
        changed, _ = self._refresh(patient=True)
        if changed and self.version != before:
            logger.info("event=retrieval_store_followed version=%s", self.version)
        # Every learned text is a change; this limits how often a busy store is read.
        self._stopped.wait(REFRESH_PAUSE_S if self._learning is not None else 0.0)

    def _fold(self) -> None:
        assert self._learning is not None
        self._stopped.wait(FOLD_PAUSE_S)
        for namespace in self._learning.fold_due():
            logger.info("event=retrieval_delta_folded namespace=%s", namespace)


def _release(stopped: threading.Event, store: SegmentStore, learning: LiveLearning | None) -> None:
    stopped.set()
    if learning is not None:
        learning.close()
    store.close()
