"""What one node has: versions, devices, memory, disk, the model's files, the way to Redis."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

# Nodes that differ in these misunderstand one another, or compute something else.
PACKAGES = ("draftline", "ray", "torch", "transformers", "numba", "protobuf", "grpcio", "msgspec")
# Of a matrix product and of a sum on the CPU; the best of several counts.
MATRIX, SUM_BYTES, TRIES = 1024, 128 * 2**20, 3
SMI = ("nvidia-smi", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits")
SMI_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One, by its driver; memory and used bytes."""

    name: str
    memory: float
    used: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Sizes in bytes, rates of the CPU a second: bytes read, operations of float32 products.

    model_bytes  of the target's weight files as this node sees them; None: it has none
    problem      why the model cannot be read here
    redis_s      seconds of a PING; None: not asked for
    redis        why it cannot be reached, or an empty text
    """

    address: str
    host: str
    versions: Mapping[str, str]
    cpus: int
    memory: float
    disk_free: float
    bandwidth: float
    operations: float
    gpus: tuple[Gpu, ...] = ()
    model_bytes: int | None = None
    problem: str = ""
    redis_s: float | None = None
    redis: str = ""
    resources: Mapping[str, float] = field(default_factory=dict)


def read_node(address: str, model: str, folder: str, redis_url: str | None) -> NodeFacts:
    """The facts of the machine that this runs on.

    folder  whose disk is told: where models and compiled code are kept
    """
    model_bytes, problem = _model(model)
    redis_s, redis = (None, "") if redis_url is None else _ping(redis_url)
    bandwidth, operations = _cpu_rates()
    return NodeFacts(
        address=address,
        host=socket.gethostname(),
        versions=_versions(),
        cpus=os.cpu_count() or 1,
        memory=_memory(),
        disk_free=_disk_free(Path(folder).expanduser()),
        bandwidth=bandwidth,
        operations=operations,
        gpus=read_gpus(_smi()),
        model_bytes=model_bytes,
        problem=problem,
        redis_s=redis_s,
        redis=redis,
    )


def read_gpus(text: str) -> tuple[Gpu, ...]:
    """What `nvidia-smi` says, a GPU a line: its name, MiB in all, MiB in use."""
    gpus = []
    for line in text.splitlines():
        name, total, used = (part.strip() for part in line.rsplit(",", 2))
        # A GPU that is cut into instances tells no number.
        if total.isdigit() and used.isdigit():
            gpus.append(Gpu(name, int(total) * 2.0**20, int(used) * 2.0**20))
    return tuple(gpus)


def _smi() -> str:
    try:
        found = subprocess.run(
            SMI, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def _memory() -> float:
    """Bytes that a new process may have."""
    for line in Path("/proc/meminfo").read_text("ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return 1024.0 * int(line.split()[1])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _disk_free(folder: Path) -> float:
    while not folder.exists():
        folder = folder.parent
    return float(shutil.disk_usage(folder).free)


def _model(model: str) -> tuple[int | None, str]:
    from ....core.errors import CheckpointError  # noqa: PLC0415 - they take seconds to import
    from ....models.load.checkpoint import TensorFiles, resolve_model_path  # noqa: PLC0415

    try:
        return TensorFiles(resolve_model_path(model)).num_bytes, ""
    except CheckpointError as error:
        return None, str(error)


def _ping(url: str) -> tuple[float | None, str]:
    import redis  # noqa: PLC0415

    try:
        with redis.Redis.from_url(url, socket_timeout=5, socket_connect_timeout=5) as client:
            client.ping()
            start = time.perf_counter()
            client.ping()
            return time.perf_counter() - start, ""
    # Its words may hold the URL's password.
    except (redis.RedisError, ValueError) as error:
        return None, type(error).__name__


def _cpu_rates() -> tuple[float, float]:
    """Bytes a second that are read, and operations a second of products, on all cores."""
    import torch  # noqa: PLC0415

    matrix, column = torch.ones(MATRIX, MATRIX), torch.ones(SUM_BYTES // 4)
    read_s = product_s = float("inf")
    for _ in range(TRIES):
        start = time.perf_counter()
        column.sum().item()
        read_s = min(read_s, time.perf_counter() - start)
        start = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        product_s = min(product_s, time.perf_counter() - start)
    return SUM_BYTES / read_s, 2.0 * MATRIX**3 / product_s
