"""How long passes of other models take on other machines, by bytes, operations and links."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...core.errors import ConfigError
from ...models.layers.linear_layers import NONE
from ...models.layers.weight_memory import rounded_bytes
from ...models.load.rounding import GROUP_SIZE

FIELD = "cost-profile"
# The default drafter whose times small models use.
SMALL_MODEL = "model"
# The bundled profiles, by name.
FOLDER = Path(__file__).parents[2] / "deploy" / "assets" / "profiles"
Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Device(_Part):
    """The hardware of a stage or a drafter.

    bandwidth        memory bandwidth in bytes a second, and the share that products reach
    operations       operations a second, the share that products of many rows reach, and the share
                     of tree attention
    """

    bandwidth: Positive
    bandwidth_share: Share
    operations: Positive
    operations_share: Share
    attention_share: Share


class Network(_Part):
    """The memory traffic and the work of one pass.

    bytes                 of weights as they are kept: of quantised ones, of codes and scales
    head_bytes            of these, of the target's output head, which is never rounded
    operations            of one row
    kv_bytes              of one token of the text, read with each pass; 0: not read
    attention_operations  of one row for each visible token
    pass_s                fixed seconds of a pass: launches, sampling
    is_parallel           a draft is one pass at any depth; else one for each level
    """

    bytes: Positive
    head_bytes: Annotated[float, Field(ge=0)] = 0.0
    operations: Positive
    kv_bytes: Annotated[float, Field(ge=0)] = 0.0
    attention_operations: Annotated[float, Field(ge=0)] = 0.0
    pass_s: Annotated[float, Field(ge=0)] = 0.0
    is_parallel: bool = False


class CostProfile(_Part):
    """A target over stages, and its drafters.

    target     all its stages together; `pass_s` is of each stage
    hop_s      seconds of a message from stage to stage
    row_bytes  of a row of hidden states
    link       bytes a second from stage to stage
    drafters   by kind: as shown by `draftline doctor --drafter` for a head, else that of
               `DrafterConfig`. Other drafters use their real time
    sources    the source of each number
    """

    name: str
    num_stages: Annotated[int, Field(ge=1, le=64)]
    device: Device
    target: Network
    hop_s: Annotated[float, Field(ge=0)] = 0.0
    row_bytes: Annotated[float, Field(ge=0)] = 0.0
    link: Positive = 1.0
    drafters: Mapping[str, Network] = Field(default_factory=dict)
    sources: Mapping[str, str]

    def rounded(self, quantization: str) -> CostProfile:
        """The profile with the target's weights, of 16 bits, rounded as an engine does."""
        if quantization == NONE:
            return self
        size = self.target.bytes - self.target.head_bytes
        share = rounded_bytes((1, GROUP_SIZE), quantization) / (2 * GROUP_SIZE)
        kept = self.target.head_bytes + size * share
        target = self.target.model_copy(update={"bytes": kept})
        return self.model_copy(update={"target": target})

    def stage_s(self, num_rows: int, num_read: int, num_seen: int = 0) -> float:
        """Seconds of a stage for a step, with the message to the next.

        num_read  tokens whose keys and values are read
        num_seen  visible tokens, summed over all rows
        """
        own = self.target
        whole = products_s(self.device, own, num_rows)
        whole += _attention_s(self.device, own, num_read, num_seen)
        seconds = whole / self.num_stages + own.pass_s
        if self.num_stages == 1:
            return seconds
        return seconds + self.hop_s + num_rows * self.row_bytes / self.link

    def draft_s(self, kind: str, depth: int, num_rows: int) -> float:
        """Seconds of a draft with this many levels by one of `drafters`, `num_rows` rows a pass."""
        network = self.drafters[kind]
        one = products_s(self.device, network, num_rows) + network.pass_s
        return one * (1 if network.is_parallel else depth)


def products_s(device: Device, network: Network, num_rows: int) -> float:
    """Seconds of reading the weights, plus those of the rows' operations.

    The two hardly overlap: on an H200 65 rows of an 8B take 1.3 times as long as one, and those of
    a 70B 1.25 times (`benchmarks/gpu/measure/against_profile.py`).
    """
    read = network.bytes / (device.bandwidth * device.bandwidth_share)
    return read + num_rows * network.operations / (device.operations * device.operations_share)


def _attention_s(device: Device, network: Network, num_read: int, num_seen: int) -> float:
    read = num_read * network.kv_bytes / (device.bandwidth * device.bandwidth_share)
    operations = num_seen * network.attention_operations
    return read + operations / (device.operations * device.attention_share)


def bundled_profiles() -> list[str]:
    """Names of the profiles that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_cost_profile(name: str) -> CostProfile:
    """A profile by its name or file. Raises `ConfigError`."""
    path = FOLDER / f"{name}.json" if name in bundled_profiles() else Path(name).expanduser()
    try:
        return CostProfile.model_validate_json(path.read_bytes())
    except OSError as error:
        known = ", ".join(bundled_profiles())
        raise ConfigError(
            FIELD, f"cannot read {path} ({error.strerror}); known: {known}"
        ) from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(FIELD, f"{path}: {place}: {first['msg']}") from error
