"""What a recording keeps of the target off the text, and what it predicts from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from draftline.cluster.pipeline.local_pipeline import LocalPipeline
from draftline.measure.replay.recording import (
    OffText,
    RecordedAnswer,
    Recording,
    RowContext,
    off_text,
    probed_contexts,
    read_recording,
)
from draftline.measure.replay.replay_pipeline import Predictions, TappedPipeline
from support.fakes.fake_stage import FakeStage
from support.inputs.steps import PagedRequest, make_step

# Prompt 1 2, answer 3 4.
ANSWER = RecordedAnswer(
    name="one",
    prompt="ab",
    seed=7,
    prompt_ids=(1, 2),
    answer_ids=(3, 4),
    top_next_tokens=((3, 30), (4, 40)),
)
RECORDING = Recording(
    model="demo", max_tokens=2, temperature=0.0, ignore_eos=True, answers=(ANSWER,)
)


@pytest.mark.parametrize(
    ("start", "tokens", "expected"),
    [
        (1, (2, 3), (3, ())),
        (1, (2, 9, 4), (2, (9, 4))),
        (3, (4, 5), (4, (5,))),
        (2, (8,), (2, (8,))),
    ],
)
def test_what_stands_in_the_text_is_left_out(
    start: int, tokens: tuple[int, ...], expected: tuple[int, tuple[int, ...]]
) -> None:
    assert off_text((1, 2, 3, 4), start, tokens) == expected


def test_questions_off_the_text_are_kept_and_survive_the_file(tmp_path: Path) -> None:
    probed = {
        RowContext(7, 1, (2, 9)): (5, 6),
        # In the text, where the recording has the target's tokens already.
        RowContext(7, 1, (2, 3)): (4, 40),
        # Of a request that warmed an engine up.
        RowContext(8, 1, (2, 9)): (1, 1),
    }
    recording = RECORDING.with_probed(probed)
    assert recording.answers[0].off_text == (OffText(2, (9,), (5, 6)),)
    recording.write(tmp_path / "r.jsonl")
    assert read_recording(tmp_path / "r.jsonl") == recording


def test_predictions_are_exact_where_the_context_is_known_and_guessed_elsewhere() -> None:
    recording = RECORDING.with_probed({RowContext(7, 1, (2, 9)): (5, 6)})
    predictions = Predictions(recording.answers)
    assert predictions.after(RowContext(7, 1, (2,))) == (3, 30)
    assert predictions.after(RowContext(7, 1, (2, 3))) == (4, 40)
    assert predictions.after(RowContext(7, 1, (2, 9))) == (5, 6)
    # 9 at another place: as it was after 2 9, the longest end that is known.
    assert predictions.after(RowContext(7, 2, (3, 2, 9))) == (5, 6)
    # Beyond the answer's end, and tokens that were never seen.
    assert predictions.after(RowContext(7, 3, (4,))) == ()
    assert predictions.after(RowContext(7, 1, (77,))) == ()
    assert predictions.after(RowContext(99, 0, (3,))) == (4, 40)


def test_a_row_follows_the_root_and_its_ancestors() -> None:
    chunk = PagedRequest([0]).chunk([1, 2], 0)
    # Below the root 5 come 6 and, beside it, 8; 7 follows 6.
    tree = PagedRequest([1, 2]).tree([5, 6, 7, 8], [-1, 0, 1, 0], start=3)
    step = make_step([chunk, tree], probe_rows=np.array([2, 4, 5]))
    assert [context[1:] for context in probed_contexts(step)] == [
        (3, (5,)),
        (3, (5, 6, 7)),
        (3, (5, 8)),
    ]


def test_several_tokens_a_step_are_measured_until_something_is_recorded() -> None:
    tapped = TappedPipeline(LocalPipeline([FakeStage(0, True, decodes_several=True)]))
    assert tapped.decodes_several
    tapped.probed = {}
    assert not tapped.decodes_several
