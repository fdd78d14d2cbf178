"""What live learning must do over any store; a test class per store inherits it."""

from __future__ import annotations

import threading
import time

import pytest
from draftline.core.errors import ConfigError
from draftline.retrieval_store.delta.delta_log import text_digest
from draftline.retrieval_store.delta.fold import Folder
from draftline.retrieval_store.delta.settings import LearningSettings
from support.contracts.delta_log_contract import FINGERPRINT, OTHER_MODEL, learned
from support.inputs.segments import context, make_segment
from support.servers.learning_replica import Replica, soon


class LearningContract:
    def test_what_one_replica_learns_all_serve(self, url: str) -> None:
        one, two = Replica(url), Replica(url)
        one.learn("tenant", 1, 2, 3, 4)
        assert one.fresh_answer("tenant", 1, 2) == {3}
        assert two.fresh_answer("tenant", 1, 2) == {3}
        two.learn("tenant", 1, 2, 5)
        assert one.fresh_answer("tenant", 1, 2) == {3, 5}
        assert not one.service.refresh()

    def test_running_services_follow_by_themselves(self, url: str) -> None:
        one, two = Replica(url), Replica(url)
        two.service.start()
        try:
            one.learn("tenant", 1, 2, 3)
            soon(lambda: two.answer("tenant", 1, 2) == {3})
        finally:
            two.service.stop()

    def test_nothing_reaches_shared_or_another_namespace(self, url: str) -> None:
        replica = Replica(url)
        replica.store.put("shared", make_segment([[1, 2, 9]]))
        replica.learn("shared", 1, 2, 3)
        replica.learn("tenant", 1, 2, 4)
        assert replica.learning.counts["shared"] == 1
        assert replica.fresh_answer("tenant", 1, 2) == {4, 9}
        for other in ("shared", "tenant2", "tenan", "Tenant", "*", "tenan?", "", "tenant/", "t"):
            assert replica.answer(other, 1, 2) == {9}

    def test_even_a_log_of_shared_is_not_read_or_folded(self, url: str) -> None:
        """Whoever wrote it there by other means."""
        replica = Replica(url)
        replica.log.append("shared", [learned(1, 2, 3)])
        assert replica.fresh_answer("shared", 1, 2) == set()
        assert replica.fresh_answer("tenant", 1, 2) == set()
        settings = LearningSettings(fold_entries=1)
        assert Folder(replica.store, replica.log, FINGERPRINT, settings).fold_due() == []

    def test_namespaces_that_are_off_are_not_learned(self, url: str) -> None:
        replica = Replica(url, off=["silent"])
        replica.learn("silent", 1, 2, 3)
        replica.learn("loud", 1, 2, 3)
        assert replica.fresh_answer("silent", 1, 2) == set()
        assert replica.log.epochs().keys() == {"loud"}
        assert replica.learning.counts["off"] == 1
        with pytest.raises(ConfigError, match="namespace"):
            Replica(url, off=["*"])

    @pytest.mark.parametrize("name", ["", "*", "a/b", "..", "a:b", "{a}", "x" * 65])
    def test_unsafe_names_are_never_written(self, url: str, name: str) -> None:
        replica = Replica(url)
        replica.learn(name, 1, 2, 3)
        assert replica.log.epochs() == {}
        assert replica.learning.counts == {"unfit": 1}

    def test_texts_that_do_not_fit_are_refused(self, url: str) -> None:
        replica = Replica(url)
        replica.learn("tenant", 1, 2)
        replica.learn("tenant", 1, 2, 32)
        replica.learn("tenant", -1, 2, 3)
        replica.learn("tenant", *[1] * 5000)
        assert replica.learning.counts == {"unfit": 4}

    def test_a_bad_event_in_a_log_keeps_nobody_elses_away(self, url: str) -> None:
        replica = Replica(url)
        replica.log.append("bad", [learned(1, 2, 99), learned(-5, 2, 3), learned()])
        replica.learn("good", 1, 2, 3)
        assert replica.fresh_answer("good", 1, 2) == {3}
        assert replica.answer("bad", 1, 2) == set()
        assert replica.folder.fold("bad", must=True)
        assert replica.folder.fold("good", must=True)

    def test_texts_of_other_models_are_not_read(self, url: str) -> None:
        Replica(url, fingerprint=OTHER_MODEL).learn("tenant", 1, 2, 3)
        assert Replica(url).fresh_answer("tenant", 1, 2) == set()

    def test_a_repeated_text_is_written_once_and_counts_more(self, url: str) -> None:
        replica = Replica(url)
        for _ in range(3):
            replica.learn("tenant", 1, 2, 3)
            replica.service.refresh()
        events = [logged.event for logged in replica.log.read("tenant")]
        assert [event.tokens is None for event in events] == [False, True, True]
        assert replica.learning.counts["repeated"] == 2
        assert replica.learning.segments["tenant"].header.num_documents == 3

    def test_texts_that_held_an_accepted_run_gain_weight(self, url: str) -> None:
        replica = Replica(url)
        replica.learn("tenant", 1, 2, 3, 4, 5)
        replica.learn("tenant", 9, 8, 7, 6)
        replica.service.refresh()
        replica.learn("tenant", 11, 2, 3, 4, 12, accepted=((3, 4),))
        assert replica.learning.counts["credited"] == 1
        credit = replica.log.read("tenant")[-1].event
        assert credit.digest == text_digest(context(1, 2, 3, 4, 5))
        # And folded ones do, too.
        assert replica.folder.fold("tenant", must=True)
        replica.service.refresh()
        replica.learn("tenant", 13, 8, 7, 6, accepted=((3, 4),))
        assert replica.log.read("tenant")[-1].event.digest == text_digest(context(9, 8, 7, 6))

    def test_a_fold_moves_texts_into_one_segment(self, url: str) -> None:
        one, two = Replica(url), Replica(url)
        for turn in range(3, 9):
            one.learn("tenant", 1, 2, turn)
            if turn % 2:
                assert one.folder.fold("tenant", must=True)
                assert one.log.read("tenant") == []
                assert len(one.store.manifest().segment_ids("tenant")) == 1
        wanted = set(range(3, 9))
        assert one.fresh_answer("tenant", 1, 2) == wanted
        assert two.fresh_answer("tenant", 1, 2) == wanted

    def test_folds_are_due_by_size_or_age(self, url: str) -> None:
        replica = Replica(url)
        replica.learn("tenant", 1, 2, 3)
        assert replica.learning.fold_due() == []
        for settings in (
            LearningSettings(fold_entries=1),
            LearningSettings(fold_tokens=3),
            LearningSettings(log_seconds=1e-3, half_life=1e9),
        ):
            time.sleep(0.002)
            folder = Folder(replica.store, replica.log, FINGERPRINT, settings)
            assert folder.fold_due() == ["tenant"]
            assert folder.fold_due() == []
            replica.learn("tenant", 1, 2, 3)

    def test_nothing_is_lost_while_another_folds(self, url: str) -> None:
        """Readers find every text at every moment, whether in the log or in the segment."""
        writer, reader = Replica(url), Replica(url)
        writer.learn("tenant", 1, 2, 3)
        assert reader.fresh_answer("tenant", 1, 2) == {3}
        done = threading.Event()

        def fold() -> None:
            for turn in range(12):
                writer.learn("tenant", 1, 2, 4 + turn)
                writer.folder.fold("tenant", must=True)
            done.set()

        thread = threading.Thread(target=fold)
        thread.start()
        seen: set[int] = set()
        while not done.is_set():
            found = reader.fresh_answer("tenant", 1, 2)
            # Eight nodes are asked for; a reader that lost the segment would have fewer.
            assert len(found) >= min(len(seen), 8)
            seen |= found
        thread.join()
        subtree = reader.service
        subtree.refresh()
        last = subtree.lookup([context(1, 2)], ["tenant"], [64])[0]
        assert set(last.tokens[last.parents == -1].tolist()) == set(range(3, 16))

    def test_a_fold_that_died_leaves_nothing_behind(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replica = Replica(url)
        replica.learn("tenant", 1, 2, 3)
        change = replica.store.change

        def die(*arguments: object, **options: object) -> str:
            change(*arguments, **options)  # pyright: ignore[reportArgumentType]
            raise KeyboardInterrupt

        monkeypatch.setattr(replica.store, "change", die)
        with pytest.raises(KeyboardInterrupt):
            replica.folder.fold("tenant", must=True)
        monkeypatch.undo()
        assert len(replica.store.manifest().segment_ids("tenant")) == 1
        assert replica.fresh_answer("tenant", 1, 2) == {3}
        replica.learn("tenant", 1, 2, 4)
        assert replica.folder.fold("tenant", must=True)
        assert len(replica.store.manifest().segment_ids("tenant")) == 1
        assert replica.fresh_answer("tenant", 1, 2) == {3, 4}

    def test_a_fold_forgets_what_nobody_used(self, url: str) -> None:
        """Within the bound the texts of the highest weight stay."""
        replica = Replica(url, LearningSettings(folded_tokens=8))
        for value in range(3, 9):
            replica.learn("tenant", 1, 2, value, value)
        replica.service.refresh()
        replica.learn("tenant", 1, 2, 4, 4)
        assert replica.folder.fold("tenant", must=True)
        assert replica.fresh_answer("tenant", 1, 2) == {4, 8}

    def test_a_corpus_build_in_between_is_not_undone(self, url: str) -> None:
        replica = Replica(url)
        replica.learn("tenant", 1, 2, 3)
        assert replica.folder.fold("tenant", must=True)
        for segment_id in replica.store.manifest().segment_ids("tenant"):
            replica.store.delete("tenant", segment_id)
        replica.learn("tenant", 1, 2, 4)
        assert replica.folder.fold("tenant", must=True)
        assert replica.fresh_answer("tenant", 1, 2) == {4}
