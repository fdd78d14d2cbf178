"""What is measured, and what is found of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from ....cluster.config import DrafterConfig
from ....core.request.sampling_params import StreamingMode

BUNDLED = "bundled"
TEMPERATURES = (0.0, 1.0)
# Drafters of more than one request, or fewer stages.
LOADED = ("suffix", "all training-free")
# Answers of one request at a time, and of a request beside others, a round.
PROMPTS_ALONE, PROMPTS_EACH = 8, 2
# Nodes of a tree, and of each drafter's.
TREE_NODES = 60
MODES: Mapping[str, StreamingMode] = {"plain": "off", "rounds": "off", "streamed": "auto"}


def _drafter(kind: str, **options: object) -> DrafterConfig:
    return DrafterConfig(kind=kind, max_nodes=TREE_NODES, **options)


_SUFFIX, _LOOKUP = _drafter("suffix"), _drafter("prompt_lookup")
_SPECTRA, _MODEL = _drafter("spectra"), _drafter("model", model="demo-drafter")
_GRIFFIN = _drafter("head", name="griffin", model="demo-griffin", placement="actor", top_k=10)
_FREE = (
    _SUFFIX, _SPECTRA, _LOOKUP, _drafter("anpd"), _drafter("lookahead"),
    _drafter("token_recycling"), _drafter("retrieval", store="demo"),
)  # fmt: skip
DRAFTERS: Mapping[str, Sequence[DrafterConfig]] = {
    "suffix": (_SUFFIX,),
    "spectra": (_SPECTRA,),
    "prompt_lookup + suffix": (_LOOKUP, _SUFFIX),
    "model": (_MODEL,),
    "griffin": (_GRIFFIN,),
    "all training-free": _FREE,
    "all": (*_FREE, _MODEL, _GRIFFIN),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests at once, whose answers are those of a set at a temperature.

    drafters  of `DRAFTERS`
    """

    prompts: str
    temperature: float
    drafters: str
    stages: int
    together: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Of one mode under a load, in one round; times are the simulation's.

    tokens_s    committed a second, of all requests together
    tau         tokens of a request by its steps
    rows        of a request in a step, its root's included
    right, refused, killed  shares of the nodes
    idle        share of the time that the first stage had no work
    host        share of the time that the host worked
    """

    mode: str
    tokens_s: float
    tau: float
    rows: float
    right: float
    refused: float
    killed: float
    idle: float
    host: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All modes under a load: by mode, one for each round."""

    load: Load
    found: Mapping[str, Sequence[Found]]


# Requests at once, by stages.
TOGETHER = {2: (1, 2, 8, 32), 4: (1, 2, 4, 8, 32), 8: (2, 4, 8, 32)}


def every_load(
    prompts: Sequence[str], temperatures: Sequence[float] = TEMPERATURES
) -> Iterator[Load]:
    """One request over 8 stages with all drafters; greedily, ever more requests over fewer with
    some."""
    for name, temperature, drafters in product(prompts, temperatures, DRAFTERS):
        yield Load(prompts=name, temperature=temperature, drafters=drafters, stages=8, together=1)
    if 0.0 not in temperatures:
        return
    for drafters, stages in product(LOADED, TOGETHER):
        for together in TOGETHER[stages]:
            yield Load(
                prompts=BUNDLED, temperature=0.0, drafters=drafters, stages=stages,
                together=together,
            )  # fmt: skip
