"""`draftline lossless --shadow` over the metrics of servers."""

from __future__ import annotations

import io
from dataclasses import replace

import httpx
import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.api.http.metrics import ServerMetrics
from draftline.deploy.cli.bench.job import LosslessJob
from draftline.deploy.cli.bench.run import run_shadow
from draftline.deploy.engine.shadow import ShadowCounts
from rich.console import Console
from support.fakes.fake_engine import engine_stats

JOB = LosslessJob(base_url="http://host:8000/v1", api_key="key")


def shown(monkeypatch: pytest.MonkeyPatch, *counts: ShadowCounts) -> tuple[int, str]:
    """The exit code and what is printed, of a server with an engine for each of these."""
    engines = [
        replace(engine_stats(), engine_id=str(index), shadow=own)
        for index, own in enumerate(counts)
    ]
    return shown_of(monkeypatch, ServerMetrics("m").render(engines).decode())


def shown_of(monkeypatch: pytest.MonkeyPatch, text: str, status: int = 200) -> tuple[int, str]:
    def get(url: str, *, headers: dict[str, str], timeout: float) -> httpx.Response:
        assert url == "http://host:8000/metrics"
        assert headers == {"Authorization": "Bearer key"}
        assert timeout > 0
        return httpx.Response(status, text=text, request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx, "get", get)
    out = io.StringIO()
    code = run_shadow(JOB, Console(file=out, width=100))
    return code, out.getvalue()


def test_counts_of_all_engines_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = shown(monkeypatch, ShadowCounts(same=1200, near_tie=1), ShadowCounts(same=34))
    assert code == 0
    assert "1,234" in text


def test_a_fault_is_an_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _ = shown(monkeypatch, ShadowCounts(same=9, differs=1))
    assert code == 1


def test_counts_are_of_a_server() -> None:
    with pytest.raises(ConfigError, match="shadow: is what a server counted: give its --base-url"):
        run_shadow(replace(JOB, base_url=None), Console())


def test_nothing_compared_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    code, text = shown(monkeypatch, ShadowCounts(skipped=3))
    assert code == 1
    assert "shadow_rate" in text


@pytest.mark.parametrize(
    ("text", "status"), [("", 200), ("what is this {", 200), ("no", 401), ("up 1\n", 200)]
)
def test_what_is_no_server_of_draftline_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, status: int
) -> None:
    with pytest.raises(ConfigError, match="base-url"):
        shown_of(monkeypatch, text, status)
