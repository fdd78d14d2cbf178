"""Drafters by the clock of the simulation: of the host, or beside it on a device of their own."""

from __future__ import annotations

from ....cluster.config import DrafterConfig, EngineConfig
from ....cluster.drafting.factory import build_drafter, keeps_answers
from ....cluster.links.link import InprocLink
from ....measure.simulate.apart_link import ApartLink
from ....measure.simulate.cost_profile import CostProfile
from ....measure.simulate.host_clock import HostClock
from ....measure.simulate.simulation import kind_of
from ....measure.simulate.slowed_link import SlowedLink


def link_to(
    config: DrafterConfig, engine: EngineConfig, clock: HostClock, profile: CostProfile
) -> SlowedLink:
    """A new drafter of these settings; those that the profile has work beside the host."""
    drafter = build_drafter(config, engine)
    link = InprocLink(drafter, config.max_nodes, keeps_answers=keeps_answers(config))
    kind = kind_of(config)
    if kind in profile.drafters:
        return ApartLink(link, kind, profile, clock, drafts_ahead=False)
    return SlowedLink(link, kind, profile, clock)
