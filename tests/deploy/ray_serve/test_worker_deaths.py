"""What Ray prints of a process that died: shorter, and nothing else is touched."""

from __future__ import annotations

import sys

import pytest
from draftline.deploy.ray_serve.runtime import short_reports, shortened

# As Ray 2.60 has it, of a stage that was killed.
REPORT = (
    "A worker died or was killed while executing a task by an unexpected system error. To "
    "troubleshoot the problem, check the logs for the dead worker. Lease ID: 0500000000b2 Worker "
    "ID: d659111a4c9c Node ID: f87f59e21e83 Worker IP address: 192.0.2.2 Worker port: 44751 Worker "
    "PID: 16220 Worker exit type: SYSTEM_ERROR Worker exit detail: {detail} Some common causes "
    "include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop "
    "--force was called, or (3) the worker crashed unexpectedly due to SIGSEGV or another "
    "unexpected error."
)
DETAIL = "Worker unexpectedly exits with a connection error code 2. End of file."


@pytest.mark.parametrize(
    ("before", "after"), [("(raylet) ", ""), ("\x1b[33m(raylet)\x1b[0m ", "\n")]
)
def test_a_report_keeps_its_process_and_its_end(before: str, after: str) -> None:
    said = shortened(before + REPORT.format(detail=DETAIL) + after)
    assert said == f"{before}process 16220 died: {DETAIL.removesuffix('.')}{after}"


def test_a_report_without_causes_keeps_all_of_its_detail() -> None:
    detail = "The actor exited: its init raised ValueError: no. 3"
    whole = REPORT.format(detail=detail).partition(" Some common")[0]
    assert shortened(whole) == f"process 16220 died: {detail}"


@pytest.mark.parametrize(
    "text",
    [
        "(raylet) The node with node id f87f has been marked dead.",
        "(ServeReplica pid=3) 2026-11-28 WARNING draftline event=stage_replaced stage=1",
        # Another version's words.
        "A worker died or was killed while executing a task. Pid 16220.",
        "",
    ],
)
def test_everything_else_stays(text: str) -> None:
    assert shortened(text) == text


def test_what_is_printed_meanwhile_is_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    stdout = sys.stdout
    with short_reports():
        # As `print` does.
        for text in (f"(raylet) {REPORT.format(detail=DETAIL)}", "\n", "ready\n"):
            sys.stdout.write(text)
        assert sys.stdout.isatty() == stdout.isatty()
    assert sys.stdout is stdout
    assert capsys.readouterr().out == (
        f"(raylet) process 16220 died: {DETAIL.removesuffix('.')}\nready\n"
    )
