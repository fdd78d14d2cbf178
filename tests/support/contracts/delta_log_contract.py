"""What every delta log must do; a test class per log inherits it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from draftline.core.errors import ConfigError
from draftline.retrieval_store.delta.delta_log import DeltaEvent, DeltaLog, Folded, text_digest
from draftline.retrieval_store.delta.settings import Fingerprint, LearningSettings

FINGERPRINT = Fingerprint(tokenizer_hash="tokenizer", model_hash="model", vocab_size=32)
OTHER_MODEL = Fingerprint(tokenizer_hash="tokenizer", model_hash="other", vocab_size=32)

FOLDED = Folded("a" * 32, 5.0, {"b" * 32: 2.0}, ("c" * 32,))

Make = Callable[[Fingerprint, LearningSettings], DeltaLog]


def learned(*tokens: int) -> DeltaEvent:
    """The event of a new text."""
    text = np.array(tokens, dtype=np.int32)
    return DeltaEvent(text_digest(text), 1.0, text)


def texts(log: DeltaLog, namespace: str) -> list[list[int]]:
    """The texts in a log, in order."""
    events = [logged.event for logged in log.read(namespace)]
    return [event.tokens.tolist() for event in events if event.tokens is not None]


class DeltaLogContract:
    @pytest.fixture
    def log(self, make_log: Make) -> DeltaLog:
        return make_log(FINGERPRINT, LearningSettings())

    @pytest.fixture
    def second_log(self, make_log: Make) -> DeltaLog:
        return make_log(FINGERPRINT, LearningSettings())

    def test_a_new_log_is_empty(self, log: DeltaLog) -> None:
        assert log.epochs() == {}
        assert log.read("n") == []
        assert log.folded("n") == Folded()

    def test_events_come_back_in_order_with_their_times(
        self, log: DeltaLog, second_log: DeltaLog
    ) -> None:
        before = time.time()
        log.append("n", [learned(1, 2, 3), DeltaEvent("0" * 32, 0.5)])
        log.append("n", [learned(4, 5, 6)])
        found = second_log.read("n")
        assert [logged.event.weight for logged in found] == [1.0, 0.5, 1.0]
        assert [logged.event.tokens is None for logged in found] == [False, True, False]
        assert texts(second_log, "n") == [[1, 2, 3], [4, 5, 6]]
        assert found[1].event.digest == "0" * 32
        assert all(abs(logged.time - before) < 60 for logged in found)
        assert [one.event.digest for one in second_log.read("n", found[1].position)] == [
            found[2].event.digest
        ]
        assert second_log.read("n", found[2].position) == []

    def test_namespaces_and_models_are_apart(self, log: DeltaLog, make_log: Make) -> None:
        other = make_log(OTHER_MODEL, LearningSettings())
        log.append("one", [learned(1, 2, 3)])
        other.append("one", [learned(7, 8, 9)])
        log.append("two", [learned(4, 5, 6)])
        assert texts(log, "one") == [[1, 2, 3]]
        assert texts(other, "one") == [[7, 8, 9]]
        assert log.epochs().keys() == {"one", "two"}
        assert other.epochs().keys() == {"one"}

    def test_an_epoch_changes_only_when_events_leave(self, log: DeltaLog) -> None:
        log.append("n", [learned(1, 2, 3)])
        first = log.epochs()["n"]
        log.append("n", [learned(4, 5, 6)])
        assert log.epochs()["n"] == first
        with log.locked("n") as held:
            assert held
            log.fold("n", FOLDED, log.read("n")[0].position)
        assert log.epochs()["n"] != first
        assert texts(log, "n") == [[4, 5, 6]]
        assert log.folded("n") == FOLDED

    def test_what_is_appended_after_the_reading_outlives_the_fold(
        self, log: DeltaLog, second_log: DeltaLog
    ) -> None:
        log.append("n", [learned(1, 2, 3)])
        with log.locked("n"):
            up_to = log.read("n")[-1].position
            second_log.append("n", [learned(4, 5, 6)])
            log.fold("n", Folded(), up_to)
        assert texts(second_log, "n") == [[4, 5, 6]]

    def test_one_folds_at_a_time(self, log: DeltaLog, second_log: DeltaLog) -> None:
        with log.locked("n") as first, second_log.locked("n") as second:
            assert (first, second) == (True, False)
        with second_log.locked("n") as again:
            assert again

    def test_a_log_is_bounded_oldest_out_first(self, make_log: Make) -> None:
        log = make_log(FINGERPRINT, LearningSettings(log_entries=100))
        for start in range(0, 600, 20):
            log.append("n", [learned(1, 2, value) for value in range(start, start + 20)])
        found = [tokens[2] for tokens in texts(log, "n")]
        # Redis trims whole nodes of a stream, of 100 entries at most.
        assert found == list(range(600 - len(found), 600))
        assert 100 <= len(found) <= 200

    def test_unsafe_namespaces_are_refused(self, log: DeltaLog) -> None:
        for name in ("", "..", "a/b", "a:b", "*"):
            with pytest.raises(ConfigError, match="namespace"):
                log.append(name, [learned(1, 2, 3)])

    def test_writers_lose_nothing_of_one_another(self, log: DeltaLog, second_log: DeltaLog) -> None:
        def write(writer: DeltaLog, first: int) -> None:
            for value in range(first, first + 25):
                writer.append("n", [learned(1, 2, value)])

        threads = [
            threading.Thread(target=write, args=(writer, first))
            for writer, first in ((log, 0), (second_log, 100))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = {tokens[2] for tokens in texts(log, "n")}
        assert found == {*range(25), *range(100, 125)}
