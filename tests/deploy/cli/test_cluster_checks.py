"""`draftline doctor --cluster`: nodes, their GPUs, and hops between them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.cli import cluster_checks, main
from draftline.deploy.cli.cluster_checks import (
    GIB,
    Gpu,
    NodeProbe,
    cluster_findings,
    node_finding,
    pairs_of,
    read_gpus,
    run_cluster_doctor,
)
from draftline.deploy.cli.doctor import Finding
from ray.exceptions import RayError
from rich.console import Console
from support.servers.ray_cluster import ray_nodes

HOST = "127.0.0.1"
H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, 0.0)
NEAR = (1e-4, 4e-3)


class FakeRay:
    """Ray whose nodes answer at once, or do not.

    hops  seconds or an error, by the node at the far end
    """

    def __init__(
        self, addresses: Sequence[str], silent: Sequence[str] = (), hops: Mapping[str, Any] = {}
    ) -> None:
        self._addresses = addresses
        self._silent = silent
        self._hops = hops

    def nodes(self) -> list[dict[str, Any]]:
        """The head last, as it may be."""
        heads = [{}, {"node:__internal_head__": 1.0}]
        return [
            {
                "Alive": address != "gone",
                "NodeID": address,
                "NodeManagerAddress": address,
                "Resources": {"CPU": 4.0, **heads[address == self._addresses[-1]]},
            }
            for address in self._addresses
        ]

    def remote(self, kind: type) -> Any:
        """Actors of this class."""
        assert kind is NodeProbe
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self._probe))

    def _probe(self, address: str) -> Any:
        lost = RayError(f"first line\n{address} has no draftline")
        look = lost if address in self._silent else (f"host of {address}", ())
        answers = {"look": look, "serve_store": 1, "time_hop": self._hops.get(address, NEAR)}
        return SimpleNamespace(
            **{
                name: SimpleNamespace(remote=lambda *_, answer=answer: answer)
                for name, answer in answers.items()
            }
        )

    def get(self, answer: Any, timeout: float) -> Any:
        """The first error, else what was asked for."""
        assert timeout > 0
        for part in answer if isinstance(answer, list) else [answer]:
            if isinstance(part, Exception):
                raise part
        return answer


def found(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> dict[str, Finding]:
    monkeypatch.setattr(cluster_checks, "ray", FakeRay(*arguments))
    monkeypatch.setattr(cluster_checks, "at_node", lambda node: node)
    return {finding.subject: finding for finding in cluster_findings()}


def test_nodes_that_see_each_other_the_head_first(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = found(monkeypatch, ["b", "c", "gone", "a"])
    assert list(findings) == ["node a", "node b", "node c", "hop a - b", "hop a - c", "hop b - c"]
    assert all(finding.ok for finding in findings.values())
    assert findings["node b"].text == "host of b, no GPU"
    assert findings["hop a - b"].text == "0.10 ms a token, 4.0 ms a chunk of 512 tokens"


def test_a_node_that_is_silent_is_missing_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = found(monkeypatch, ["b", "c", "a"], ["b"])
    assert list(findings) == ["node a", "node b", "node c", "hop a - c"]
    silent = findings["node b"]
    assert silent.text == "does not answer: b has no draftline"
    assert (silent.ok, silent.needed) == (False, True)


@pytest.mark.parametrize(
    ("hop", "message", "needed"),
    [
        ((2e-2, 3e-2), "far apart", False),
        ((1e-4, 8e-2), "prompts wait for it", False),
        (RayError("it timed out"), "it timed out: open all ports", True),
    ],
)
def test_hops_that_are_long_thin_or_closed(
    hop: Any, message: str, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The end that does not begin is asked first.
    findings = found(monkeypatch, ["b", "a"], [], {"a": hop, "b": hop})
    finding = findings["hop a - b"]
    assert message in finding.text
    assert (finding.ok, finding.needed) == (False, needed)


def test_every_pair_of_few_nodes_and_the_heads_and_neighbours_of_many() -> None:
    assert pairs_of(["a"]) == []
    assert len(pairs_of("abcde")) == 10
    many = pairs_of([f"{number}" for number in range(50)])
    assert len(many) == len(set(many)) == 49 + 48
    assert {node for pair in many for node in pair} == {f"{number}" for number in range(50)}


@pytest.mark.parametrize(
    ("used", "given", "message"),
    [
        (0.0, 1, "Ray may give 1 of 2: ray start --num-gpus 2"),
        (30 * GIB, 2, "60 GiB in use: end what uses them"),
    ],
)
def test_gpus_that_ray_lacks_or_that_are_in_use(used: float, given: int, message: str) -> None:
    gpu = Gpu(H100.name, H100.memory, used)
    finding = node_finding("a", "host", (gpu, gpu), given)
    assert message in finding.text
    assert (finding.ok, finding.needed) == (False, False)
    fine = node_finding("a", "host", (H100,), 1)
    assert (fine.ok, fine.text) == (True, "host, NVIDIA H100 80GB HBM3 (80 GiB)")


def test_gpus_are_read_from_the_drivers_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "NVIDIA H100 80GB HBM3, 81559, 4\nNVIDIA A100, 40GB, 40960, 100\nslice, [N/A], [N/A]\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=text))
    assert read_gpus() == (
        Gpu("NVIDIA H100 80GB HBM3", 81559 * 2.0**20, 4 * 2.0**20),
        Gpu("NVIDIA A100, 40GB", 40960 * 2.0**20, 100 * 2.0**20),
    )

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(subprocess, "run", missing)
    assert read_gpus() == ()


def test_without_a_cluster_it_says_how_to_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(cluster_checks, "ray", SimpleNamespace(init=init))
    with pytest.raises(ConfigError, match=r"no Ray cluster here \(Could not find .*ray start"):
        run_cluster_doctor(Console())


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["doctor", "--sizes"], "--sizes"),
        (["doctor", "--stages=2"], "--stages"),
        (["-v", "doctor", "--sizes"], "--sizes"),
    ],
)
def test_flags_that_left_are_refused_by_what_to_use(
    arguments: list[str],
    flag: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["draftline", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {flag}: was removed; ")
    assert "docs/operations.md" in line


@pytest.mark.net
def test_a_hop_is_timed() -> None:
    probes = [NodeProbe(HOST), NodeProbe(HOST)]
    # Once more with the ends changed, as in the next pair.
    for ends in (probes, probes[::-1]):
        port = ends[0].serve_store()
        with ThreadPoolExecutor(2) as pool:
            times = [
                pool.submit(probe.time_hop, place, HOST, port) for place, probe in enumerate(ends)
            ]
            for token_s, chunk_s in (one.result(60) for one in times):
                assert 0 < token_s < chunk_s < 60


@pytest.mark.net
def test_a_closed_way_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_checks, "MEETING", cluster_checks.MEETING / 20)
    probe = NodeProbe(HOST)
    port = probe.serve_store()
    with pytest.raises(RuntimeError):
        probe.time_hop(0, HOST, port)
    with pytest.raises(RuntimeError):
        NodeProbe(HOST).time_hop(1, HOST, 1)


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_two_nodes_of_a_cluster() -> None:
    with ray_nodes(["127.0.0.2"]):
        first, second, hop = cluster_findings()
    assert second.subject == "node 127.0.0.2"
    assert first.ok
    assert second.ok
    assert hop.subject == f"hop {first.subject.removeprefix('node ')} - 127.0.0.2"
    assert "ms a token" in hop.text, hop
