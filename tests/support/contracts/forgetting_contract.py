"""What forgetting a namespace must do over any store; a test class per store inherits it."""

from __future__ import annotations

import pytest
from draftline.core.errors import ConfigError
from draftline.retrieval_store.learning import forget_namespace
from draftline.retrieval_store.serving.open_store import open_eraser
from support.contracts.delta_log_contract import OTHER_MODEL
from support.servers.learning_replica import Replica, soon


class ForgettingContract:
    def test_a_forgotten_namespace_is_gone_everywhere(self, url: str) -> None:
        one, two = Replica(url), Replica(url)
        for name in ("tenant", "tenant2", "tenan", "t.nant", "delta", "chunk"):
            one.learn(name, 1, 2, 3)
            one.folder.fold(name, must=True)
            one.learn(name, 1, 2, 4)
        Replica(url, fingerprint=OTHER_MODEL).learn("tenant", 1, 2, 5)
        assert two.fresh_answer("tenant", 1, 2) == {3, 4}
        eraser = open_eraser(url)
        assert forget_namespace(eraser, "tenant") > 0
        assert eraser.remains("tenant") == []
        for replica in (one, two):
            assert replica.fresh_answer("tenant", 1, 2) == set()
            for other in ("tenant2", "tenan", "t.nant", "delta", "chunk"):
                assert replica.answer(other, 1, 2) == {3, 4}
        assert forget_namespace(eraser, "tenant") == 0
        # It may begin anew, with nothing of before.
        one.learn("tenant", 1, 2, 6)
        assert two.fresh_answer("tenant", 1, 2) == {6}
        eraser.close()

    def test_forgotten_and_filled_again_between_two_readings(self, url: str) -> None:
        one, two = Replica(url), Replica(url)
        one.learn("tenant", 1, 2, 3)
        assert two.fresh_answer("tenant", 1, 2) == {3}
        forget_namespace(open_eraser(url), "tenant")
        one.learn("tenant", 1, 2, 4)
        assert two.fresh_answer("tenant", 1, 2) == {4}

    def test_running_services_forget_by_themselves(self, url: str) -> None:
        one, two = Replica(url), Replica(url)
        one.learn("tenant", 1, 2, 3)
        two.service.start()
        try:
            soon(lambda: two.answer("tenant", 1, 2) == {3})
            forget_namespace(open_eraser(url), "tenant")
            soon(lambda: two.answer("tenant", 1, 2) == set())
        finally:
            two.service.stop()

    @pytest.mark.parametrize("name", ["", "*", "..", "tenan?", "[t]enant", "{draftline:retrieval}"])
    def test_no_pattern_is_forgotten(self, url: str, name: str) -> None:
        replica = Replica(url)
        replica.learn("tenant", 1, 2, 3)
        with pytest.raises(ConfigError, match="namespace"):
            forget_namespace(open_eraser(url), name)
        assert replica.fresh_answer("tenant", 1, 2) == {3}
