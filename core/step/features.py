"""Cuts the features that a step answered into those of its requests."""

from __future__ import annotations

from collections.abc import Sequence

from ..arrays import lengths_of
from ..proposals import FeatureRows
from ..steps import StepInput, StepOutput
from ..verify.walk import Paths


def features_of(
    step: StepInput, request_ids: Sequence[str], paths: Paths, output: StepOutput
) -> list[FeatureRows]:
    """Features of the committed tokens that each of the step's `feature_requests` had in it.

    `paths` are those through the step's trees, whose requests come first in it.
    """
    if not step.feature_requests:
        return []
    assert output.features is not None, "the stage did not do what it was asked"
    lengths, starts = lengths_of(paths.ends).tolist(), step.request_starts.tolist()
    found, first = [], 0
    for place in step.feature_requests:
        count = lengths[place] if place < len(lengths) else starts[place + 1] - starts[place]
        values = output.features[first : first + count]
        found.append(FeatureRows(request_ids[place], int(step.context_lens[place]), values))
        first += count
    assert first == len(output.features), "stage and coordinator walked different ways"
    return found
