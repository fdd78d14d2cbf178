"""Cuts the features that a step answered into those of its requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Float32, lengths_of
from ..proposals import FeatureRows
from ..steps import StepInput, StepOutput
from ..verify.walk import Paths


def features_of(
    step: StepInput, request_ids: Sequence[str], paths: Paths, output: StepOutput
) -> list[FeatureRows]:
    """Features of the committed tokens that each of the step's `feature_requests` had in it, but of
    slices.

    `paths` are those through the step's trees, whose requests come first in it.
    """
    parts = _parts(step, paths, output)
    return [
        FeatureRows(request_ids[place], int(step.context_lens[place]), values)
        for place, values in parts.items()
        if place not in step.slice_requests
    ]


def features_of_slices(step: StepInput, paths: Paths, output: StepOutput) -> dict[int, Float32]:
    """Features of the root and all nodes of slices whose are wanted, by the place of a request."""
    if not step.slice_requests:
        return {}
    parts = _parts(step, paths, output)
    return {place: parts[place] for place in step.slice_requests if place in parts}


def _parts(step: StepInput, paths: Paths, output: StepOutput) -> dict[int, Float32]:
    """The rows of each of the step's `feature_requests`."""
    if not step.feature_requests:
        return {}
    assert output.features is not None, "the stage did not do what it was asked"
    lengths, starts = lengths_of(paths.ends).tolist(), step.request_starts.tolist()
    parts, first = {}, 0
    for place in step.feature_requests:
        count = lengths[place] if place < len(lengths) else starts[place + 1] - starts[place]
        if place in step.slice_requests:
            chosen = np.searchsorted(step.logits_rows, step.request_starts[place : place + 2])
            count = int(chosen[1] - chosen[0])
        parts[place] = output.features[first : first + count]
        first += count
    assert first == len(output.features), "stage and coordinator walked different ways"
    return parts
