"""Settings of an engine and its drafters: typed, validated at start, unknown keys refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from ..core.errors import ConfigError
from ..core.request.sampling_params import PipeliningMode
from .checked_settings import Settings
from .removed_settings import REMOVED_OPTIONS

# The profile of a drafter that has its paper's options, and the trees of the papers, draft tokens:
# EAGLE-2's of every head, SPECTRA's and REST's; Lookahead's 15 guesses of 4.
PAPER = "paper"
PAPER_NODES = {"head": 60, "mtp": 60, "spectra": 60, "retrieval": 64, "lookahead": 60}
# Those of other drafters.
NODES = 16

Backend = Literal["local", "ray"]
Acceptance = Literal["coupled", "rejection", "typical"]
NodeBudgetKind = Literal["adaptive", "full", "ordered"]
DrafterTransport = Literal["inproc", "grpc"]
TransportName = Literal["auto", "distributed", "nccl"]
Attention = Literal["auto", "sdpa", "triton", "flash_attn"]
# A kind of drafter that reads states of the target, and the head that its own checkpoint holds.
HEAD, MTP = "head", "mtp"
# Tokens that such a drafter and models draw among where they must declare their distribution.
DISTRIBUTION_SIZE = 64


class DrafterConfig(Settings):
    """One drafter. Keys beyond the ones below are options of its kind (`options`)."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def __init__(self, **values: Any) -> None:
        # Each class has one, or type checkers would derive another that knows no options.
        super().__init__(**values)

    kind: str = Field(
        description="prompt_lookup, spectra, lookahead, anpd, suffix, token_recycling, retrieval, "
        "model, head or mtp (a head: the layer for multi-token prediction of the model itself)"
    )
    name: str = Field("", description="source name in outputs and metrics; default: the kind")
    transport: DrafterTransport = Field(
        "inproc", description="inproc: in the engine's process; grpc: in a server"
    )
    address: str | tuple[str, ...] | None = Field(
        None,
        description="host:port of a running drafter server, or a list of several that share the"
        " requests; by default grpc starts one",
    )
    drafter_pool: str | None = Field(
        None,
        description="Ray Serve application whose drafter servers are shared by several engines;"
        " needs grpc",
    )
    servers: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="number of servers that grpc starts; they share the requests"
    )
    max_nodes: Annotated[int, Field(ge=1, le=256)] = Field(
        NODES,
        description="most draft tokens that it may propose for one request and step; with "
        "profile: paper those of its paper",
    )

    tls_ca: str | None = Field(
        None,
        description="PEM file that verifies the certificates of its gRPC servers: at address, "
        "of a pool, of its actor on Ray",
    )
    tls_certificate: str | None = Field(
        None,
        description="PEM file shown to servers that ask for a certificate; on Ray its actor "
        "serves TLS if all three are set",
    )
    tls_key: str | None = Field(None, description="PEM file of that certificate's key")
    tls_server_name: str | None = Field(
        None, description="name in the servers' certificates, if it is not the address's host"
    )
    token_env: str | None = Field(
        None,
        description="environment variable with the token for the servers at address; servers "
        "that the engine or a pool starts need none",
    )
    token_file: str | None = Field(None, description="file with that token")

    @model_validator(mode="before")
    @classmethod
    def _as_in_paper(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("profile") != PAPER:
            return values
        return {"max_nodes": PAPER_NODES.get(values.get("kind", ""), NODES)} | values

    @model_validator(mode="after")
    def _check(self) -> Self:
        # First: settings with it name a token, too, which the checks below would refuse.
        if "server" in self.options:
            raise ConfigError("server", f"was removed; {REMOVED_OPTIONS['server']}")
        self._check_servers()
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError("tls_key", "tls_certificate and tls_key go together")
        if self.token_env is not None and self.token_file is not None:
            raise ConfigError("token_file", "token_env is given, too; leave one of them out")
        for field in ("token_env", "token_file"):
            if getattr(self, field) is not None and self.address is None:
                raise ConfigError(field, "needs address: which server asks for it?")
        if self.has_tls and self.transport != "grpc":
            raise ConfigError("tls_ca", "needs transport: grpc")
        return self

    def _check_servers(self) -> None:
        for field in ("address", "drafter_pool"):
            if getattr(self, field) is not None and self.transport != "grpc":
                raise ConfigError(field, "needs transport: grpc")
        if self.drafter_pool is not None and self.address is not None:
            raise ConfigError("drafter_pool", "address is given, too; leave one of them out")
        if self.drafter_pool is not None and not self.drafter_pool:
            raise ConfigError("drafter_pool", "is empty; name an application, or leave it out")
        if self.address is not None and not self.addresses:
            raise ConfigError("address", "is an empty list; name a server, or leave it out")
        if len(set(self.addresses)) < len(self.addresses):
            raise ConfigError("address", "names a server twice")
        if self.servers > 1 and not self.is_spawned:
            raise ConfigError(
                "servers", "are started by transport: grpc without address or drafter_pool"
            )

    @property
    def has_tls(self) -> bool:
        """Whether its connections take TLS; see `drafter_tls` for the files."""
        given = (self.tls_ca, self.tls_certificate, self.tls_key, self.tls_server_name)
        return given != (None, None, None, None)

    @property
    def source(self) -> str:
        """The `source` of its proposals."""
        return self.name or self.kind

    @property
    def addresses(self) -> tuple[str, ...]:
        """The running servers that it has."""
        address = self.address
        return (address,) if isinstance(address, str) else address or ()

    @property
    def is_spawned(self) -> bool:
        """Whether the engine starts servers for it."""
        return self.transport == "grpc" and self.address is None and self.drafter_pool is None

    @property
    def options(self) -> dict[str, Any]:
        """Options of its kind, not validated yet."""
        return dict(self.model_extra or {})


def _paper_kind(drafter: Any) -> str | None:
    """The kind of a drafter with its paper's options; None: it has ours."""
    if isinstance(drafter, DrafterConfig):
        return drafter.kind if drafter.options.get("profile") == PAPER else None
    if not isinstance(drafter, dict) or drafter.get("profile") != PAPER:
        return None
    return str(drafter.get("kind"))


class EngineConfig(Settings):
    """One engine: a target over its stages, and its drafters in order of priority."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)

    model: str = Field(
        "demo",
        description="folder, GGUF file or hub id of the target; demo is the bundled model, "
        "demo-hybrid a bundled hybrid, and smollm2 a public one",
    )
    served_model_name: str | None = Field(
        None,
        description="name in the API; default: model, or the last part of its path if it is a "
        "folder",
    )
    backend: Backend = Field(
        "local", description="local: stages in this process; ray: stages are Ray actors"
    )
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=8)] = Field(
        1, description="number of pipeline stages that the target's layers are split into"
    )
    stage_transport: TransportName = Field(
        "auto",
        description="how Ray stages pass hidden states; auto: nccl if each stage has a GPU of "
        "its own, else distributed (through host memory)",
    )
    cpus_per_stage: Annotated[float, Field(gt=0)] = Field(
        1.0,
        description="CPUs that a stage's Ray actor reserves; also its threads on a CPU, at least 1",
    )
    gpus_per_stage: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="GPUs that a stage on GPUs reserves; a fraction lets stages share one"
    )
    standby_stages: Annotated[int, Field(ge=0, le=8)] = Field(
        1,
        description="spare Ray workers that replace a dead stage on a CPU; each holds about 0.5"
        " GB and reserves nothing. On Ray Serve all replicas share them",
    )
    cpus_per_drafter: Annotated[float, Field(gt=0)] = Field(
        1.0, description="CPUs that a drafter's Ray actor reserves"
    )
    gpus_per_drafter: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0, description="GPUs that a drafter's Ray actor reserves; 0: it runs on CPUs"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="arithmetic; auto: float32 on CPUs, the checkpoint's 16-bit type on GPUs",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="device to compute on; auto: a GPU if there is one"
    )
    compile: Literal["auto", "off"] = Field(
        "auto",
        description="auto: float32 stages on CPUs run draftline's C++ kernels, compiled "
        "at the first start if g++ is installed; off: torch's kernels",
    )
    batch_invariant: Literal["auto", "off", "on"] = Field(
        "auto",
        description="on: a request is computed alike, bit by bit, whatever shares its steps, or"
        " the start fails; slower on GPUs. auto: where that is free, which is on "
        "CPUs with the C++ kernels",
    )
    quantization: Literal["none", "int8", "int4", "fp8"] = Field(
        "none", description="round the weights of linear layers to 8 or 4 bits, which is lossy"
    )
    attention: Attention = Field(
        "auto", description="attention backend; draftline doctor shows what auto picks"
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs: a faster start, slower steps")
    max_model_len: Annotated[int, Field(ge=2)] | None = Field(
        None, description="most tokens of prompt plus answer; default: the model's context"
    )
    block_size: Annotated[int, Field(ge=1, le=256)] = Field(16, description="tokens in a KV block")
    kv_cache_tokens: Annotated[int, Field(ge=64)] | None = Field(
        None,
        description="KV slots of every stage, over all requests; default: what a GPU has room "
        "for, 16384 on a CPU",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="type of keys and values; auto: as dtype; fp8: half of bfloat16's memory",
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = Field(
        0.9, description="share of a GPU's memory that weights and KV cache may use together"
    )
    enable_prefix_caching: bool = Field(
        True, description="requests of one tenant share the KV of equal prefixes"
    )
    max_num_seqs: Annotated[int, Field(ge=1, le=1024)] = Field(
        16, description="requests that run at once"
    )
    max_queued_requests: Annotated[int, Field(ge=0)] = Field(
        256, description="requests that may wait; further ones get 429"
    )
    max_num_batched_tokens: Annotated[int, Field(ge=16)] = Field(
        512, description="most tokens of a step: draft tokens first, then prompt chunks"
    )
    multi_step_ms: Annotated[float, Field(ge=0, le=1000)] = Field(
        40.0,
        description="longest step that decodes several tokens of each request: without drafts, "
        "on one stage with the C++ kernels; 0: one token a step",
    )
    tree_nodes: Annotated[int, Field(ge=0, le=256)] = Field(
        NODES,
        description="most draft tokens of one request and step; 0: plain decoding. Where all "
        "drafters have profile: paper, the default is the largest of their trees",
    )
    node_budget: NodeBudgetKind = Field(
        "adaptive",
        description="how much is drafted. adaptive: what saves time; full: ask every drafter "
        "and verify the largest trees; ordered: as full, drafters named first go "
        "first, the default where all drafters have profile: paper",
    )
    pipelined_trees: PipeliningMode = Field(
        "auto",
        description="pipeline a request's tree through the stages in chunks. auto: with four "
        "stages or more, and at most half as many requests as steps in flight; on: "
        "always; off: whole trees. Not with structured outputs or acceptance rules; changes no "
        "answer",
    )
    acceptance: Acceptance = Field(
        "coupled",
        description="how drafts are accepted. coupled: answers do not depend on drafts; "
        "rejection: answers have the target's distribution; typical: lossy",
    )
    shadow_rate: Annotated[float, Field(ge=0, le=1)] = Field(
        0.0,
        description="share of requests that are repeated without drafts when the server is idle"
        " and compared; draftline:shadow_requests_total counts the results. Needs "
        "acceptance: coupled",
    )
    draft_deadline_ms: Annotated[float, Field(gt=0, le=60_000)] = Field(
        50.0, description="how long a step waits for drafters in other processes"
    )
    step_timeout_s: Annotated[float, Field(gt=0)] = Field(
        30.0,
        description="a step without an answer for this long, and for 20 times the slowest "
        "recent step, counts as a lost stage",
    )
    recovery_timeout_s: Annotated[float, Field(gt=0)] = Field(
        120.0, description="how long lost stages may take to come back; requests wait for them"
    )
    drafters: tuple[DrafterConfig, ...] = Field(
        (),
        description="drafters in order of priority; serve and other commands default to suffix "
        "and prompt_lookup, EngineConfig in a script to none",
    )
    trace_steps: Path | None = Field(
        None,
        description="file for Chrome trace events of each step, for ui.perfetto.dev; it is "
        "overwritten",
    )

    @field_validator("trace_steps")
    @classmethod
    def _anchor_trace(cls, value: Path | None) -> Path | None:
        # Ray's processes run in folders of their own.
        return None if value is None else value.absolute()

    @field_validator("compile", "batch_invariant", "pipelined_trees", mode="before")
    @classmethod
    def _read_switch(cls, value: Any) -> Any:
        # YAML reads a bare on or off as a boolean.
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @field_validator("drafters", mode="before")
    @classmethod
    def _build_drafters(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, list | tuple):
            raise ValueError("must be a list of drafters")
        model = info.data.get("model", "")
        return tuple(_drafter(index, item, model) for index, item in enumerate(value))

    @model_validator(mode="before")
    @classmethod
    def _as_in_papers(cls, values: Any) -> Any:
        drafters = values.get("drafters") if isinstance(values, dict) else None
        if not isinstance(drafters, list | tuple):
            return values
        kinds = [_paper_kind(drafter) for drafter in drafters]
        nodes = [PAPER_NODES.get(kind, NODES) for kind in kinds if kind is not None]
        if not nodes or None in kinds:
            return values
        return {"tree_nodes": max(nodes), "node_budget": "ordered"} | values

    @model_validator(mode="after")
    def _check(self) -> Self:
        sources = [drafter.source for drafter in self.drafters]
        doubled = sorted({source for source in sources if sources.count(source) > 1})
        if doubled:
            raise ConfigError(
                "drafters", f"two drafters are named {doubled[0]!r}; give each a name"
            )
        for index, drafter in enumerate(self.drafters):
            is_here = drafter.is_spawned and self.backend == "local"
            if is_here and drafter.has_tls:
                raise ConfigError(
                    f"drafters[{index}].tls_ca",
                    "its server is a child process on loopback, which takes no TLS; leave it out",
                )
        if self.shadow_rate and self.acceptance != "coupled":
            raise ConfigError(
                "shadow_rate",
                f"needs acceptance: coupled; under {self.acceptance} answers depend on drafts",
            )
        if self.gpus_per_stage < 1 and self.kv_cache_tokens is None:
            raise ConfigError(
                "kv_cache_tokens", "must be given where gpus_per_stage lets stages share a GPU"
            )
        return self

    @property
    def name(self) -> str:
        """The model's name in the API."""
        return self.served_model_name or _folder_name(self.model) or self.model

    @property
    def drafters_with_defaults(self) -> tuple[DrafterConfig, ...]:
        """The drafters with what `acceptance` asks of them: models declare what they draw from."""
        if self.acceptance == "coupled":
            return self.drafters
        return tuple(
            DrafterConfig(**{"distribution_size": DISTRIBUTION_SIZE, **drafter.model_dump()})
            if drafter.kind in {"model", HEAD}
            else drafter
            for drafter in self.drafters
        )


def _folder_name(model: str) -> str:
    """The last part of a folder's or GGUF file's path; of a hub id or another name, nothing."""
    # The API may run where the folder is not.
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        return path.stem
    if not model.startswith((".", "~", "/")) and not path.is_dir():
        return ""
    return path.resolve().name if path.name in {"", ".."} else path.name


def _drafter(index: int, item: Any, model: str) -> DrafterConfig:
    """A drafter's settings; `kind: mtp` is a head in the folder of the served model."""
    if not isinstance(item, DrafterConfig | dict):
        raise ConfigError(f"drafters[{index}]", "must be a mapping with a kind")
    try:
        drafter = item if isinstance(item, DrafterConfig) else DrafterConfig(**item)
        if drafter.kind != MTP:
            return drafter
        if "model" in drafter.options:
            raise ConfigError("model", "of kind mtp is the served model; leave it out")
        own = {"kind": HEAD, "name": drafter.source, "model": model}
        return DrafterConfig(**drafter.model_dump(exclude_unset=True) | own)
    except ConfigError as error:
        raise ConfigError(f"drafters[{index}].{error.field}", error.message) from error
