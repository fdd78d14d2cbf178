"""Passwords of store URLs and values of secret fields stay out of errors, logs and reprs."""

from __future__ import annotations

import logging
import traceback

import pytest
from draftline.cluster.checked_settings import Settings, redacted, shown
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.links.failures import FailureLog, failure_reason
from draftline.core.errors import ConfigError, DrafterError
from support.fakes.fake_link import FakeClock

PASSWORD = "hunter2-hunter2"
URL = f"redis://user:{PASSWORD}@host:6379/0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (URL, "redis://user:***@host:6379/0"),
        ("rediss://:p@ss/w:rd@host", "rediss://:***@host"),
        ("redis://hunter2-hunter2@host", "redis://***@host"),
        (f"unix://u:{PASSWORD}@/run/redis?db=0", "unix://u:***@/run/redis?db=0"),
        (f"redis://host?db=1&password={PASSWORD}&a=b", "redis://host?db=1&password=***&a=b"),
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("/srv/store", "/srv/store"),
    ],
)
def test_passwords_of_urls_are_not_shown(text: str, expected: str):
    assert redacted(text) == expected


def test_what_may_hold_anything_is_not_shown():
    assert shown({"a": PASSWORD}) == "a mapping of 1 keys"
    assert shown([PASSWORD]) == "a list of 1"
    assert PASSWORD not in shown(PASSWORD, ("server", "api_keys", 0))
    assert shown(5, ("kv_cache_tokens",)) == "5"
    assert len(shown("x" * 1000)) < 100


class Keyed(Settings):
    """As settings of a server are."""

    api_keys: tuple[str, ...] = ()


@pytest.mark.parametrize(
    "build",
    [
        lambda: DrafterConfig(kind="retrieval", transport=URL),
        lambda: DrafterConfig(kind="retrieval", store=URL, max_nodes={"store": URL}),
        lambda: DrafterConfig(kind="retrieval", store=URL, address="host:1"),
        lambda: DrafterConfig(**{"kind": "retrieval", URL: 1, "max_nodes": 0}),
        lambda: EngineConfig(**{URL: 1}),
        lambda: EngineConfig(drafters=URL),
        lambda: EngineConfig(drafters=[URL]),
        lambda: EngineConfig(drafters=[{"kind": "retrieval", "store": URL, "max_nodes": "x"}]),
        lambda: EngineConfig(drafters=[{"kind": "retrieval", "store": URL}] * 2),
        lambda: Keyed(api_keys=PASSWORD),
        lambda: Keyed(api_keys=[{"key": PASSWORD}]),
    ],
)
def test_no_error_of_the_settings_tells_a_secret(build):
    with pytest.raises(ConfigError) as caught:
        build()
    # As a traceback shows it.
    assert PASSWORD not in "".join(traceback.format_exception_only(caught.value))
    error: BaseException | None = caught.value
    while error is not None:
        assert PASSWORD not in str(error)
        error = error.__cause__


def test_no_repr_tells_a_secret():
    drafter = DrafterConfig(kind="retrieval", store=URL)
    for settings in (drafter, EngineConfig(drafters=[drafter]), Keyed(api_keys=(PASSWORD,))):
        assert PASSWORD not in repr(settings)
        assert PASSWORD not in str(settings)
    assert "user:***@host" in repr(EngineConfig(drafters=[drafter]))


def test_what_fails_again_and_again_is_counted(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    clock = FakeClock()
    log = FailureLog(logging.getLogger("test"), "drafter=far", period_s=30.0, clock=clock)
    for _ in range(1000):
        log.log("raised", "why")
    log.log("lost", "gone")
    clock.now += 30.0
    log.log("raised", "why")
    assert [record.message for record in caplog.records] == [
        "drafter=far event=raised why",
        "drafter=far event=lost gone",
        "drafter=far event=raised left_out=999 why",
    ]


def test_the_words_of_other_errors_may_be_a_requests():
    try:
        {}["what a request said"]
    except KeyError as error:
        reason = failure_reason(error)
    assert reason.startswith("KeyError in test_the_words")
    assert "request said" not in reason
    assert failure_reason(DrafterError("out of reach")) == "out of reach"
    assert failure_reason(ValueError("x")) == "ValueError"
