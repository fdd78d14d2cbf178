"""Arguments of `draftline train`; fields with a description are flags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ....cluster.config import EngineConfig
from ....core.errors import ConfigError
from ....models.heads.dspark import MarkovKind
from ....training.heads.feature_passes import MaskForm
from ....training.heads.student import Divergence
from ..flags import FlagGroup
from .recipes import RECIPES


@dataclass(frozen=True, slots=True, kw_only=True)
class DataJob:
    """Arguments of `draftline train data`."""

    output: Annotated[Path, Field(description="folder of the texts; goes on where it was killed")]
    model: Annotated[str, Field(description="target: a folder, hub id or bundled model")] = "demo"
    prompts: Annotated[
        Path | None,
        Field(
            description="file of prompts or chats, in a form that `bench --prompts` reads; of "
            "chats the user's turns are kept; default: a chat model invents them, others get "
            "the beginnings of the Python files that the demo models were trained on"
        ),
    ] = None
    num_texts: Annotated[int, Field(ge=1, description="prompts or chats in all")] = 2000
    turns: Annotated[int, Field(ge=1, description="most turns of a chat that are answered")] = 1
    system_prompt: Annotated[
        str, Field(description="system message of every chat; default: that of the file")
    ] = ""
    max_tokens: Annotated[int, Field(ge=4, description="most tokens of an answer")] = 192
    temperature: Annotated[
        str, Field(description="of the answers; of several, separated by commas, each has its turn")
    ] = "0.7"
    seed: Annotated[int, Field(ge=0, description="of the answers")] = 0
    max_num_seqs: Annotated[int, Field(ge=1, description="answers at once")] = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadJob:
    """Arguments of `draftline train KIND`; `OWN_FLAGS` apply to some kinds."""

    texts: Annotated[Path, Field(description="folder of `draftline train data`")]
    output: Annotated[Path, Field(description="folder of the trained head or model")]
    run_dir: Annotated[
        Path | None,
        Field(description="folder of checkpoints and log; default: beside the output, .run"),
    ] = None
    model: Annotated[str, Field(description="target that generated the texts")] = "demo"
    initial_head: Annotated[
        str | None,
        Field(
            description="head of the same kind to go on from, a folder or hub id, which also says "
            "how large it is; default: a new one"
        ),
    ] = None
    student: Annotated[
        str | None,
        Field(
            description="model that is trained further: a folder, hub id or bundled model with the "
            "target's tokenizer"
        ),
    ] = None
    layers: Annotated[
        str | None,
        Field(
            description="in place of --student, layers of the target that make the model, with its "
            "embedding, norm and output head; ascending from 0, separated by commas"
        ),
    ] = None
    divergence: Annotated[
        Divergence,
        Field(description="loss: KL(target || model), the other way round, or the mean of both"),
    ] = "forward"
    num_steps: Annotated[int, Field(ge=1, description="steps of the optimizer")] = 2000
    recipe: Annotated[
        Literal["paper", "released"] | None,
        Field(
            description="loss, network and learning rate as the kind's paper has them, or the code "
            "that its authors released; other flags change parts of it; default: what did best here"
        ),
    ] = None
    texts_per_step: Annotated[
        int | None, Field(ge=1, description="texts of a step; default: 8, or the recipe's")
    ] = None
    window: Annotated[int, Field(ge=4, description="most tokens of a text")] = 2048
    peak_lr: Annotated[
        float | None,
        Field(
            gt=0,
            description="highest learning rate; default: that of the recipe, else by the width of "
            "the target, or of the model that is trained (0.2 / width, at most 0.001)",
        ),
    ] = None
    num_passes: Annotated[
        int | None, Field(ge=1, description="depth of the drafts that are trained on; by the kind")
    ] = None
    num_aligned: Annotated[
        int | None,
        Field(
            ge=0,
            description="best tokens among which earlier drafts must be for a row to count; 0: all "
            "rows count; by the kind",
        ),
    ] = None
    num_best: Annotated[
        int | None,
        Field(
            ge=1,
            description="the target's most probable tokens that count beside its distribution; "
            "default: 10, as published for models that leave little to the others",
        ),
    ] = None
    best_weight: Annotated[
        float | None,
        Field(
            ge=0,
            description="how much these tokens count beside features (1) and distribution (0.1); "
            "default: as published, 1 of hass and 0.5 of griffin; 0: not at all",
        ),
    ] = None
    feature_weight: Annotated[
        float | None,
        Field(
            ge=0,
            description="how much the target's features count in the loss; default: 1, or the "
            "recipe's; 0: not at all",
        ),
    ] = None
    mask_form: Annotated[
        MaskForm | None,
        Field(
            description="rows that count as GRIFFIN's paper or its code has them; default: paper, "
            "or the recipe's"
        ),
    ] = None
    fusion: Annotated[
        Literal["linear", "sampled", "guided"] | None,
        Field(description="how tokens and features meet; by the kind"),
    ] = None
    splits_output: Annotated[
        bool | None,
        Field(description="one feature predicts and another goes on from it; by the kind"),
    ] = None
    draft_length: Annotated[
        int | None,
        Field(ge=1, description="drafts of a step, all made in one pass; by the kind"),
    ] = None
    self_distillation: Annotated[
        bool,
        Field(
            description="trained on what the target says; else on what follows the same prompts in "
            "the files that they were cut from, an ablation of SpecFormer's paper"
        ),
    ] = True
    bidirectional: Annotated[
        bool | None,
        Field(
            description="drafts see each other both ways, else each those before it alone; "
            "default: both ways, or the recipe's"
        ),
    ] = None
    num_layers: Annotated[int | None, Field(ge=1, description="its layers; by the kind")] = None
    num_anchors: Annotated[
        int | None,
        Field(
            ge=1,
            description="random places in a text where it drafts, of a step; default: 32 of "
            "dflash and dspark, all of specformer and medusa",
        ),
    ] = None
    keep_rate: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="share of the rows with a draft that have the next one, too; at least a "
            "fifth have all",
        ),
    ] = 0.7
    markov_kind: Annotated[
        MarkovKind,
        Field(
            description="what the token before adds to its logits: by itself, gated by the draft's "
            "state, or by a memory of the drafts before"
        ),
    ] = "vanilla"
    markov_rank: Annotated[
        int | None,
        Field(
            ge=1,
            description="width between that token and the logits; default: a quarter of the "
            "target's width, at most 256",
        ),
    ] = None
    feature_layers: Annotated[
        str | None,
        Field(
            description="layers of the target whose outputs it reads, separated by commas; -1: the "
            "embeddings; default: by the target's depth"
        ),
    ] = None
    draft_vocab_size: Annotated[
        int | None,
        Field(
            ge=1,
            description="tokens that it can draft, the most frequent ones of the texts; default: "
            "all of the target's",
        ),
    ] = None
    share_output_head: Annotated[
        bool,
        Field(
            description="drafts by the target's rows of these tokens, which the head's file does "
            "not hold until `train export`; else by an output head of its own"
        ),
    ] = False
    intermediate_size: Annotated[
        int | None, Field(ge=1, description="inner width of its layers; default: the target's")
    ] = None
    keep_states_gib: Annotated[
        float,
        Field(
            ge=0,
            description="disk for the target's states of texts, in 16 bits, in the folder of "
            "temporary files; later epochs read them; 0: they are computed again",
        ),
    ] = 0.0
    mixed_precision: Annotated[
        Literal["no", "bf16"], Field(description="precision of the passes; weights are float32")
    ] = "no"
    seed: Annotated[int, Field(ge=0, description="of weights, order and noise")] = 0
    threads: Annotated[int, Field(ge=1, description="CPU threads")] = 1
    dry_run: Annotated[
        bool, Field(description="print what a step needs and takes, and train nothing")
    ] = False
    # Of `stages.py`, with flags of its own; None: the target is whole in this process.
    stages: EngineConfig | None = None


FUSED, BLOCKS = ("griffin", "hass", "eagle2", "fspad"), ("dflash", "dspark")
# Flags that mean nothing to other kinds.
OWN_FLAGS = {
    "initial_head": tuple(kind for kind in RECIPES if kind != "model"),
    "student": ("model",),
    "layers": ("model",),
    "divergence": ("model",),
    "num_passes": (*FUSED, "eagle3"),
    "num_aligned": FUSED,
    "num_best": ("griffin", "hass"),
    "best_weight": ("griffin", "hass"),
    "feature_weight": FUSED,
    "mask_form": FUSED,
    "fusion": FUSED,
    "splits_output": FUSED,
    "draft_length": ("specformer", "medusa", *BLOCKS, "p_eagle"),
    "bidirectional": ("specformer",),
    "recipe": ("griffin", "specformer"),
    "num_layers": (*BLOCKS, "p_eagle"),
    "num_anchors": ("specformer", "medusa", *BLOCKS),
    "keep_rate": ("p_eagle",),
    "markov_kind": ("dspark",),
    "markov_rank": ("dspark",),
    "feature_layers": ("eagle3", *BLOCKS, "p_eagle"),
    "draft_vocab_size": (*FUSED, "eagle3", "p_eagle"),
    "share_output_head": ("eagle3",),
    "intermediate_size": (*FUSED, "eagle3", "p_eagle", "specformer", *BLOCKS),
}

# Flags of a new head alone.
SHAPE_FLAGS = (
    "fusion", "splits_output", "draft_length", "bidirectional", "num_layers", "markov_kind",
    "markov_rank", "feature_layers", "draft_vocab_size", "share_output_head", "intermediate_size",
)  # fmt: skip

DATA = FlagGroup(title="Texts", kind=DataJob)
HEAD = FlagGroup(title="Training", kind=HeadJob)


def has_flag(kind: str, name: str) -> bool:
    """Whether a field of a `HeadJob` means something to a kind."""
    return kind in OWN_FLAGS.get(name, RECIPES)


def head_job(kind: str, given: Mapping[str, Any]) -> HeadJob:
    """The job of fields that were given. Raises `ConfigError` for one of other kinds alone."""
    for name in given:
        if not has_flag(kind, name):
            raise ConfigError(
                name,
                f"is of train {', '.join(OWN_FLAGS[name])}; leave --"
                f"{name.replace('_', '-')} out of train {kind}",
            )
    if given.get("initial_head"):
        for name in SHAPE_FLAGS:
            if name in given:
                raise ConfigError(
                    name, f"is that of the initial head; leave --{name.replace('_', '-')} out"
                )
    return HeadJob(**given)
