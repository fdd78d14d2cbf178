"""The parts of engines over a cost profile, and how well what is real fitted into it."""

from __future__ import annotations

from collections.abc import Sequence

from ...cluster.config import CASCADE, HEAD, DrafterConfig, EngineConfig
from ...cluster.drafting.head_features import head_folder
from ...cluster.engine.assembly import MakePipeline
from ...cluster.links.pool import AnyLink
from ...cluster.transport.stage_spec import Pipeline, StageSpec
from ...core.errors import ConfigError
from .apart_link import ApartLink
from .cost_profile import SMALL_MODEL, CostProfile
from .draft_times import head_kind
from .slowed_link import SlowedLink
from .slowed_pipeline import SlowedPipeline


class Simulation:
    """Makes pipelines and links that take as long as those of a profile, and counts over all.

    small_model  the profile's entry whose times small models take
    """

    def __init__(self, profile: CostProfile, small_model: str = SMALL_MODEL) -> None:
        """Raises `ConfigError` where the profile has no such entry."""
        if small_model not in {SMALL_MODEL, *profile.drafters}:
            known = ", ".join(name for name in profile.drafters if name.startswith(SMALL_MODEL))
            raise ConfigError("small-model", f"{profile.name} has no {small_model!r}; has: {known}")
        self.profile = profile
        self._small_model = small_model
        self._pipelines: list[SlowedPipeline] = []
        self._links: list[SlowedLink] = []

    def config(self, config: EngineConfig) -> EngineConfig:
        """An engine's settings: its stages are the profile's, and its deadlines as much slower."""
        changes = {
            "backend": "local",
            "pipeline_parallel_size": 1,
            "draft_deadline_ms": config.draft_deadline_ms * self.profile.slowdown,
        }
        return config.model_copy(update=changes)

    def pipelines(self, _make_pipeline: MakePipeline) -> MakePipeline:
        """For `Replica`."""

        def make(specs: Sequence[StageSpec]) -> Pipeline:
            self._pipelines.append(SlowedPipeline(specs, self.profile))
            return self._pipelines[-1]

        return make

    def links(self, drafters: Sequence[DrafterConfig], links: Sequence[AnyLink]) -> list[AnyLink]:
        """Links to these drafters, in their order."""
        slowed = [
            self._slowed(drafter, link) for drafter, link in zip(drafters, links, strict=True)
        ]
        self.add_links(slowed)
        return [*slowed]

    def add_links(self, links: Sequence[SlowedLink]) -> None:
        """Count the drafts of these, too."""
        self._links += links

    def _slowed(self, drafter: DrafterConfig, link: AnyLink) -> SlowedLink:
        """A drafter that would draft ahead has a device of its own."""
        if drafter.options.get("ahead"):
            return ApartLink(link, self._kind_of(drafter), self.profile, drafts_ahead=True)
        return SlowedLink(link, self._kind_of(drafter), self.profile)

    def _kind_of(self, drafter: DrafterConfig) -> str:
        kind = kind_of(drafter)
        return self._small_model if kind == SMALL_MODEL else kind

    def late_shares(self) -> tuple[float, float]:
        """Shares of steps and of drafts whose real work took longer than the profile's."""
        steps = sum(pipeline.num_steps for pipeline in self._pipelines)
        drafts = sum(link.num_drafts for link in self._links)
        late_steps = sum(pipeline.num_late for pipeline in self._pipelines)
        late_drafts = sum(link.num_late for link in self._links)
        return late_steps / max(steps, 1), late_drafts / max(drafts, 1)

    def late_by_drafter(self) -> dict[str, float]:
        """The same share of each drafter's drafts, by name; of those that drafted."""
        counts: dict[str, tuple[int, int]] = {}
        for link in self._links:
            drafts, late = counts.get(link.name, (0, 0))
            counts[link.name] = drafts + link.num_drafts, late + link.num_late
        return {name: late / drafts for name, (drafts, late) in counts.items() if drafts}


def kind_of(drafter: DrafterConfig) -> str:
    """As profiles name it; of a cascade its models count, what copies text is next to nothing."""
    if drafter.kind == CASCADE:
        return SMALL_MODEL
    if drafter.kind != HEAD:
        return drafter.kind
    return head_kind(head_folder(drafter))
