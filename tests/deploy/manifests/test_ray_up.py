"""`ray up` with `deploy/clusters/local.yaml`: a head and a worker start, and ask for the token."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import draftline
import pytest
import yaml
from support.servers.ray_up import Hosts, hosts_of

ROOT = Path(draftline.__file__).parent
HEAD, WORKER = "127.0.0.1", "127.0.0.2"
COUNT = """
import ray
ray.init(address="{address}", log_to_driver=False, logging_level="ERROR")
alive = [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
print(len(alive), "nodes", "{worker}" in alive)
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    # A short path, since Ray's sockets lie within it.
    folder = Path(tempfile.mkdtemp(prefix="up-"))
    with hosts_of(folder, HEAD, WORKER) as made:
        yield made
    shutil.rmtree(folder, ignore_errors=True)


def cluster_file(hosts: Hosts) -> str:
    """The file of the repository with what a user changes: the machines, and who logs in."""
    config = yaml.safe_load((ROOT / "deploy" / "clusters" / "local.yaml").read_text("utf-8"))
    config["cluster_name"] = hosts.folder.name
    config["provider"] |= {"head_ip": HEAD, "worker_ips": [WORKER]}
    config["auth"]["ssh_user"] = "somebody"
    (hosts.laptop / "dist").mkdir()
    (hosts.laptop / "dist" / "draftline-0.1.0-py3-none-any.whl").touch()
    for source in config["file_mounts"].values():
        target = hosts.laptop / source
        if source.startswith("~") or target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, target)
    path = hosts.laptop / "local.yaml"
    path.write_text(yaml.safe_dump(config))
    return str(path)


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(600)
def test_both_nodes_start_and_ask_for_the_token(hosts: Hosts) -> None:
    assert hosts.run("ray", "get-auth-token", "--generate").returncode == 0
    up = hosts.run("ray", "up", "--yes", "--no-config-cache", cluster_file(hosts))
    assert up.returncode == 0, up.stdout + up.stderr

    count = COUNT.format(address=f"{HEAD}:{hosts.port}", worker=WORKER)
    deadline = time.monotonic() + 240
    # The head's autoscaler starts the worker, in the same way.
    while "2 nodes True" not in (found := hosts.run("python", "-c", count)).stdout:
        assert time.monotonic() < deadline, found.stdout + found.stderr
        time.sleep(1)

    for host in (HEAD, WORKER):
        home = hosts.folder / host
        token = home / ".ray" / "auth_token"
        assert token.read_text() == (hosts.laptop / ".ray" / "auth_token").read_text()
        assert token.stat().st_mode & 0o077 == 0
        assert "draftline-0.1.0" in (home / "pip-was-told").read_text()
        assert {one.name for one in home.glob("*.yaml")} >= {"serve.yaml", "70b.yaml"}

    wrong = hosts.run("python", "-c", count, RAY_AUTH_TOKEN="of another cluster")
    assert wrong.returncode != 0
    assert "nodes" not in wrong.stdout
