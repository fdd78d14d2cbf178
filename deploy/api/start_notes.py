"""Notes that a server prints when it starts: what it chose, and settings without effect."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from ...cluster.config import DrafterConfig, EngineConfig
from ...core.errors import CheckpointError
from ...models.load.bundled import BUNDLED_NAMES
from ...models.load.model_info import ModelInfo, read_model_info
from ...models.text.chat_template import ChatTemplate
from ...models.text.tokenizer import load_tokenizer
from ..settings.settings import ServeArgs, ServerConfig
from .tools.call_syntax import FAMILIES, tool_family

logger = logging.getLogger(__name__)


def log_notes(model_name: str, notes: Iterable[str]) -> None:
    """Log notes where there is no terminal to print them on."""
    # They are no warnings, but are logged at any level.
    logger.setLevel(logging.INFO)
    for note in notes:
        logger.info("event=start_note model=%s %s", model_name, note)


def engine_notes(engine: EngineConfig) -> Iterator[str]:
    """Of the model, its stages and its drafters."""
    target = read_model_info(engine.model)
    if engine.model in BUNDLED_NAMES:
        yield (
            f"{engine.model} is a toy for trying draftline out: what it writes looks like Python "
            "and means little"
        )
    if "pipeline_parallel_size" not in engine.model_fields_set:
        yield "1 stage, the default; pipeline_parallel_size cuts models too large for one device"
    for drafter in engine.drafters:
        yield from _vocabulary(drafter, target)


def server_notes(args: ServeArgs) -> Iterator[str]:
    """Of the server's settings beside its model."""
    for drafter in args.engine.drafters:
        learns = drafter.kind == "retrieval" and drafter.options.get("learn")
        if learns and not _may_learn(args.server):
            yield (
                f"drafter {drafter.source} learns nothing: learn: true learns what tenants' "
                "requests generate, and this server has no tenant that may learn (server.tenants)"
            )
    template = ChatTemplate(load_tokenizer(read_model_info(args.engine.model).path)).source
    if template and tool_family(args.server.tool_call_parser, template).parser is None:
        known = ", ".join(family.name for family in FAMILIES)
        yield (
            "tools: how this model calls them is not known from its chat template, so requests "
            f"with tool_choice: auto get 400; name it with tool_call_parser ({known})"
        )


def _may_learn(server: ServerConfig) -> bool:
    """Whether any request may be of a tenant that is learned of."""
    return server.tenant_store is not None or any(tenant.learn for tenant in server.tenants)


def _vocabulary(drafter: DrafterConfig, target: ModelInfo) -> Iterator[str]:
    """How a small model of another tokenizer drafts, where its settings say which model it is."""
    model = drafter.options.get("model")
    if drafter.kind != "model" or not isinstance(model, str):
        return
    # It loads torch.
    from ...drafters.model.vocabulary.choice import VOCABULARY_AUTO, read_overlap  # noqa: PLC0415

    try:
        overlap = read_overlap(read_model_info(model), target)
    except CheckpointError:
        # It may be of another machine; where it is not, loading it says what is wrong.
        return
    if overlap is None:
        return
    option = drafter.options.get("vocabulary", VOCABULARY_AUTO)
    chosen = f"{overlap.best}, as auto chose" if option == VOCABULARY_AUTO else option
    yield (
        f"drafter {drafter.source} has another tokenizer than the model: vocabulary {chosen}; "
        f"{overlap.shared.describe()}"
    )
