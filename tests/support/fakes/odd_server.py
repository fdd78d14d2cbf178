"""Stands in for `draftline.actors.drafter_server` and misbehaves, as its drafter's name says.

noisy   writes a thousand lines a message to both outputs
silent  never says that it is ready
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time

from draftline.actors.drafter_server import DrafterServer
from draftline.actors.listener import add_listen_arguments, listen_settings, serve_until_signal
from draftline.core.proposals import Proposal, Query
from support.fakes.fake_drafters import CountingDrafter

LINES = 1000


class NoisyDrafter(CountingDrafter):
    """Answers well, and says too much about it."""

    def propose(self, queries: list[Query], deadline: float | None = None) -> list[Proposal]:
        for number in range(LINES):
            logging.error("noise %d %s", number, "x" * 50)
            sys.stdout.write(f"more noise {number}\n")
        sys.stdout.flush()
        return super().propose(queries)


def main() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--target")
    parser.add_argument("--end-with-stdin", action="store_true")
    add_listen_arguments(parser)
    given = parser.parse_args()
    name = json.loads(sys.stdin.readline())["name"]
    if name == "silent":
        time.sleep(600)
    server = DrafterServer(NoisyDrafter(name), **listen_settings(given))
    asyncio.run(serve_until_signal(server.start, server.stop))


if __name__ == "__main__":
    main()
