"""A server that cannot end by itself is ended, and tells where it waited."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading, time
from draftline.deploy.ray_serve.runtime import ends_within

with ends_within(0.3):
    pass
time.sleep(0.6)
print("went on", flush=True)
def wait_for_what_is_gone():
    threading.Event().wait(30)
with ends_within(0.3):
    wait_for_what_is_gone()
"""


def test_what_hangs_ends_the_process_and_what_does_not_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=25, check=False
    )
    assert done.returncode == 1
    assert done.stdout == "went on\n"
    assert "wait_for_what_is_gone" in done.stderr


def test_an_interpreter_that_waits_for_a_thread_ends() -> None:
    program = """
import threading
from draftline.deploy.ray_serve.runtime import exits_within
def wait_for_what_is_gone():
    threading.Event().wait(30)
threading.Thread(target=wait_for_what_is_gone).start()
exits_within(1.0)
print("stopped", flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=25, check=False
    )
    assert (done.returncode, done.stdout) == (1, "stopped\n")
    assert "wait_for_what_is_gone" in done.stderr
