"""Drafters by the clock of the simulation: of the host, or beside it on a device of their own."""

from __future__ import annotations

from ....cluster.config import DrafterConfig, EngineConfig
from ....cluster.drafting.factory import build_drafter, keeps_answers
from ....cluster.links.link import InprocLink
from ....measure.simulate.apart_link import ApartLink
from ....measure.simulate.cost_profile import CostProfile
from ....measure.simulate.draft_times import times_of
from ....measure.simulate.host_clock import HostClock
from ....measure.simulate.slowed_link import SlowedLink
from ....models.load.model_info import read_model_info


def link_to(
    config: DrafterConfig, engine: EngineConfig, clock: HostClock, profile: CostProfile
) -> SlowedLink:
    """A new drafter of these settings; those that the profile has work beside the host."""
    drafter = build_drafter(config, engine)
    link = InprocLink(drafter, config.max_nodes, keeps_answers=keeps_answers(config))
    times = times_of(config, profile, read_model_info(engine.model).vocab_size)
    if times.are_known:
        return ApartLink(link, times, clock, drafts_ahead=False)
    return SlowedLink(link, times, clock)
