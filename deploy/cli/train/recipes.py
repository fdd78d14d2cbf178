"""What each kind of drafter is and how it is trained where the command does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from ....models.heads.feature_head_config import Fusion
from ....training.heads.anchored_blocks import BlockPlan
from ....training.heads.feature_passes import LossWeights, MaskForm, PassPlan
from ....training.heads.learning_rate import LearningRate
from ....training.heads.mask_rows import MaskPlan
from ....training.heads.trainer import HeadPlan

if TYPE_CHECKING:
    from .job import HeadJob


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadRecipe:
    """A kind's network and training.

    architecture      as its config.json names it; empty: a model's own
    fusion            of a feature head; None: the kind is none
    has_paper_fusion  GRIFFIN's fusion with the norms and biases of its paper
    draft_length      of a kind that makes all drafts in one pass: how many
    num_layers        of a kind that may have several
    is_bidirectional  of a SpecFormer
    noise             that its features are trained with
    is_staged, best_from, mask_form  as of `PassPlan`
    eps               of AdamW
    rate              the learning rate; None: by the target's width
    """

    architecture: str = ""
    fusion: Fusion | None = None
    splits_output: bool = False
    has_paper_fusion: bool = False
    num_passes: int = 1
    num_aligned: int = 0
    weights: LossWeights = field(default_factory=LossWeights)
    mask_form: MaskForm = "paper"
    is_staged: bool = False
    best_from: float = 0.0
    noise: float = 0.0
    draft_length: int = 0
    num_layers: int = 1
    is_bidirectional: bool = True
    texts_per_step: int = 8
    eps: float = 1e-8
    rate: LearningRate | None = None


NO_BEST = LossWeights(best_tokens=0.0)
# Losses of EAGLE's kin as the released codes have them.
RECIPES = {
    "griffin": HeadRecipe(
        architecture="GriffinModel", fusion="guided", splits_output=True, num_passes=3,
        num_aligned=3, is_staged=True, noise=0.2,
    ),
    "hass": HeadRecipe(
        architecture="EagleModel", fusion="linear", num_passes=3,
        weights=LossWeights(best_tokens=1.0), noise=0.2,
    ),
    "eagle2": HeadRecipe(
        architecture="EagleModel", fusion="linear", weights=NO_BEST, noise=0.2
    ),
    "eagle3": HeadRecipe(architecture="LlamaForCausalLMEagle3", fusion="pair", num_passes=7),
    "specformer": HeadRecipe(architecture="SpecFormerModel", draft_length=8),
    "medusa": HeadRecipe(architecture="MedusaModel", draft_length=5),
    "dflash": HeadRecipe(architecture="DFlashDraftModel", draft_length=7, num_layers=2),
    "dspark": HeadRecipe(architecture="Qwen3DSparkModel", draft_length=7, num_layers=2),
    "p_eagle": HeadRecipe(
        architecture="LlamaForCausalLMEagle3", fusion="pair", draft_length=8, num_layers=4
    ),
    "fspad": HeadRecipe(
        architecture="FspadModel", fusion="sampled", splits_output=True, weights=NO_BEST, noise=0.2
    ),
    "model": HeadRecipe(),
}  # fmt: skip
_SPECFORMER: dict[str, Any] = {
    "texts_per_step": 64, "eps": 1e-2,
    "rate": LearningRate(peak=5e-4, final=1e-5, warmup=0.05, is_cosine=True),
}  # fmt: skip
# Of 800,000 steps in both; a shorter run warms up for as large a share of it as ours.
_GRIFFIN_WARMUP = 2000
PUBLISHED: Mapping[tuple[str, Literal["paper", "released"]], Mapping[str, Any]] = {
    ("griffin", "paper"): {
        "weights": LossWeights(0.1, 1.0, 0.0, is_l1=True, is_one_hot=True),
        "has_paper_fusion": True,
        "texts_per_step": 4,
        "rate": LearningRate(peak=3e-5, warmup_steps=_GRIFFIN_WARMUP),
    },
    # Its first stage, a third of the run, has no loss on best tokens.
    ("griffin", "released"): {
        "mask_form": "code",
        "best_from": 1 / 3,
        "texts_per_step": 4,
        "rate": LearningRate(peak=5e-5, warmup_steps=_GRIFFIN_WARMUP),
    },
    ("specformer", "paper"): _SPECFORMER,
    # The public code has the ablation whose drafts see only those before them.
    ("specformer", "released"): {**_SPECFORMER, "is_bidirectional": False},
}
# EAGLE's released learning rate at its width; wider weights need smaller steps (muP).
REFERENCE_RATE, REFERENCE_WIDTH, HIGHEST_RATE = 5e-5, 4096, 1e-3


def head_recipe(kind: str, job: HeadJob) -> HeadRecipe:
    """The recipe of a kind with what the job says otherwise."""
    names = (
        "fusion", "splits_output", "num_passes", "num_aligned", "draft_length", "num_layers",
        "mask_form", "texts_per_step",
    )  # fmt: skip
    given = {name: getattr(job, name) for name in names} | {"is_bidirectional": job.bidirectional}
    published = {} if job.recipe is None else PUBLISHED[kind, job.recipe]
    recipe = replace(
        RECIPES[kind],
        **dict(published) | {name: value for name, value in given.items() if value is not None},
    )
    weights = recipe.weights
    if job.num_best is not None:
        weights = replace(weights, num_best=job.num_best)
    if job.best_weight is not None:
        weights = replace(weights, best_tokens=job.best_weight)
    if job.feature_weight is not None:
        weights = replace(weights, feature=job.feature_weight)
    return replace(recipe, weights=weights)


def head_plan(job: HeadJob, recipe: HeadRecipe, width: int) -> HeadPlan:
    """The plan of a run by the job's recipe (`head_recipe`).

    width  of the target, or of the model that is trained
    """
    rate = recipe.rate or LearningRate(
        peak=min(HIGHEST_RATE, REFERENCE_RATE * REFERENCE_WIDTH / width)
    )
    return HeadPlan(
        num_steps=job.num_steps,
        texts_per_step=recipe.texts_per_step,
        window=job.window,
        rate=rate if job.peak_lr is None else replace(rate, peak=job.peak_lr),
        eps=recipe.eps,
        passes=PassPlan(
            num_passes=recipe.num_passes,
            num_aligned=recipe.num_aligned,
            is_staged=recipe.is_staged,
            best_from=recipe.best_from,
            mask_form=recipe.mask_form,
            weights=recipe.weights,
        ),
        blocks=BlockPlan(job.num_anchors),
        masks=MaskPlan(keep_rate=job.keep_rate),
        divergence=job.divergence,
        noise=recipe.noise,
        mixed_precision=job.mixed_precision,
        kept_bytes=int(job.keep_states_gib * 2**30),
        seed=job.seed,
    )
