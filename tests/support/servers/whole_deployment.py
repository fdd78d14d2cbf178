"""`deploy/70b.yaml` with small models in place of large ones, as its first lines tell."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import draftline
import yaml

FILE = Path(draftline.__file__).parent / "deploy" / "70b.yaml"
STAND_INS = {
    "model": "demo",
    "head": "demo-griffin",
    "small_model": "demo-drafter",
    "stages": "2",
    "drafter_gpus": "0",
    "cpus": "0.1",
}


def stood_in(**variables: str) -> dict[str, Any]:
    """What the file says where its variables are these, and the stand-ins."""
    text = FILE.read_text("utf-8")
    for name, value in (STAND_INS | variables).items():
        text, count = re.subn(rf"^(  {name}: &{name} )\S+", rf"\g<1>{value}", text, flags=re.M)
        assert count == 1, name
    return yaml.safe_load(text)
