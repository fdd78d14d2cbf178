"""`ray up` of this machine: SSH that stays here, a home for every host, and one Ray for all.

Ray's own launcher, autoscaler and command runner do the work; of the machine they only see
stand-ins for `ssh` and `rsync`, `pip` (nothing is installed anew), and `ray` (each host gets
ports of its own; `ray stop` ends nothing, since it would end the Ray of others, too).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

SSH = """#!/bin/bash
# ssh [options] user@host command...
while [[ $1 != *@* ]]; do [[ $1 == -* && $1 != -tt ]] && shift; shift; done
export HOST=${1#*@}; shift
export HOME=@FOLDER@/$HOST
cd "$HOME" && exec bash -c "$*"
"""
RSYNC = """#!/bin/bash
# rsync [options] source user@host:target
from=${@: -2:1} to=${@: -1}
host=${to%%:*} path=${to#*:}
home=@FOLDER@/${host#*@}
path=${path/#\\~/$home}
mkdir -p "$(dirname "$path")"
if [[ -d $from ]]; then mkdir -p "$path" && cp -r "$from." "$path"; else cp "$from" "$path"; fi
"""
PIP = """#!/bin/bash
echo "$*" >> "$HOME/pip-was-told"
"""
RAY = """#!/bin/bash
[[ $1 == stop ]] && { echo stop >> "$HOME/ray-was-told"; exit 0; }
args=()
for arg in "$@"; do
    case $arg in
    --*-manager-port=* | --m*-worker-port=* | --metrics-export-port=*) ;;
    --port=6379) args+=(--port=@PORT@ --temp-dir=@FOLDER@/r --include-dashboard=false) ;;
    *) args+=("${arg/:6379/:@PORT@}") ;;
    esac
done
exec @RAY@ "${args[@]}" --node-ip-address="$HOST" --num-cpus=1 --object-store-memory=100000000
"""


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Hosts:
    """Folders that stand in for the homes of hosts and of the user who runs `ray up`."""

    def __init__(self, folder: Path, hosts: list[str]) -> None:
        self.folder = folder
        self.port = free_port()
        self.laptop = folder / "laptop"
        self._put("bin/ssh", SSH)
        self._put("bin/rsync", RSYNC)
        for host in hosts:
            self._put(f"{host}/draftline-venv/bin/ray", RAY)
            self._put(f"{host}/draftline-venv/bin/pip", PIP)
            self._put(f"{host}/.bashrc", 'export PATH="@FOLDER@/bin:@VENV@:$PATH"\n')
        self.laptop.mkdir()
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "HOME": str(self.laptop),
            "PATH": f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def _put(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for word, value in {
            "FOLDER": self.folder,
            "PORT": self.port,
            "RAY": shutil.which("ray", path=str(Path(sys.executable).parent)),
            "VENV": Path(sys.executable).parent,
        }.items():
            text = text.replace(f"@{word}@", str(value))
        path.write_text(text)
        path.chmod(0o755)

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command of the user who runs `ray up`."""
        return subprocess.run(
            command,
            env=self.environment | environment,
            cwd=self.laptop,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )


@contextmanager
def hosts_of(folder: Path, *hosts: str) -> Iterator[Hosts]:
    """Such folders; all processes that have one of them as their home end with it."""
    made = Hosts(folder, list(hosts))
    try:
        yield made
    finally:
        for process in psutil.process_iter():
            try:
                if process.environ().get("HOME", "").startswith(str(folder)):
                    process.kill()
            except psutil.Error:
                continue
