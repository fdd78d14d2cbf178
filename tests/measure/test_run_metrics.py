"""Every figure against a value worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from draftline.core.request.output import RequestMetrics
from draftline.measure.records import (
    Arrival,
    Record,
    SpecCounts,
    from_block,
    from_metrics,
    from_timings,
    latency,
    run_metrics,
    total,
)

# The first token after 0.5 s, then 3 tokens in 0.1 s, then 1 in 0.2 s: 5 tokens in 0.8 s.
QUICK = Record(
    prompt="a",
    text="",
    num_tokens=5,
    arrivals=(
        Arrival(0.5, (1,), ("target",)),
        Arrival(0.6, (2, 3, 4), ("spectra", "model", "target")),
        Arrival(0.8, (5,), ("target",)),
    ),
)
# One token after 0.2 s, and 2 more in 0.4 s.
SLOW = Record(
    prompt="b",
    text="",
    num_tokens=3,
    arrivals=(Arrival(0.2, (1,), ("target",)), Arrival(0.6, (2, 3), ("spectra", "target"))),
)


def test_latencies_of_a_request() -> None:
    assert QUICK.ttft == 0.5
    assert QUICK.e2el == 0.8
    assert QUICK.tpot == pytest.approx(0.3 / 4)
    assert QUICK.itl == pytest.approx([0.1, 0.2])
    assert QUICK.step_rates == pytest.approx([3 / 0.1, 1 / 0.2])
    assert QUICK.token_ids == (1, 2, 3, 4, 5)


def test_a_request_of_one_token_has_no_time_per_further_token() -> None:
    one = Record(prompt="c", text="", num_tokens=1, arrivals=(Arrival(0.3, (1,)),))
    assert one.tpot is None
    metrics = run_metrics([one], 0.3)
    assert (metrics.tpot, metrics.itl, metrics.mac_tp) == (None, None, None)
    both = run_metrics([one, QUICK], 1.1)
    assert both.tpot is not None
    assert both.tpot.mean == pytest.approx(0.3 / 4)


def test_throughputs_over_requests_that_overlap() -> None:
    """8 tokens of two requests that took 0.8 s and 0.6 s, within one second."""
    metrics = run_metrics([QUICK, SLOW], 1.0)
    assert metrics.output_throughput == 8
    assert metrics.request_throughput == 2
    assert metrics.mic_tp == pytest.approx(8 / 1.4)
    assert metrics.mac_tp == pytest.approx((30 + 5 + 5) / 3)


def test_percentiles_are_interpolated() -> None:
    found = latency([4.0, 1.0, 2.0, 3.0, 10.0])
    assert (found.mean, found.median) == (4.0, 3.0)
    assert found.p99 == pytest.approx(4 + 0.96 * 6)


def test_what_is_read_together_is_one_step() -> None:
    arrivals = (Arrival(1.0, (1,)), Arrival(1.5, (2,)), Arrival(1.50001, (3,)), Arrival(2.0, (4,)))
    late = Record(prompt="d", text="", num_tokens=4, arrivals=arrivals)
    assert late.step_rates == pytest.approx([1 / 0.5, 2 / 0.5])


def test_tokens_that_are_not_told_give_no_step_rates() -> None:
    silent = Record(prompt="e", text="ab", num_tokens=2, arrivals=(Arrival(1.0), Arrival(2.0)))
    assert silent.token_ids is None
    metrics = run_metrics([silent], 2.0)
    assert metrics.mac_tp is None
    assert metrics.mic_tp == 1
    assert metrics.counts is None
    assert metrics.position_by_source == {}


def test_positions_by_source_leave_the_prompts_pass_out() -> None:
    assert run_metrics([QUICK, SLOW], 1.0).position_by_source == {
        "model": [0, 1],
        "spectra": [2, 0],
    }


COUNTS = SpecCounts(
    num_steps=4,
    committed=7,
    drafted={"spectra": 8, "model": 2},
    accepted={"spectra": 3},
    lengths=(2, 1, 1),
)


def test_counts_of_speculation() -> None:
    """Four steps that accepted 0, 0, 1 and 2 nodes committed 4 + 3 tokens."""
    assert COUNTS.tau == 7 / 4
    assert COUNTS.acceptance_rate == 0.3
    assert COUNTS.by_position == [2 / 4, 1 / 4]
    both = total(
        [COUNTS, SpecCounts(num_steps=1, committed=1, drafted={}, accepted={}, lengths=(1,))]
    )
    assert (both.num_steps, both.committed, both.lengths) == (5, 8, (3, 1, 1))
    assert both.drafted == COUNTS.drafted


def test_the_engine_and_the_api_tell_the_same_counts() -> None:
    metrics = RequestMetrics(
        prompt_tokens=3,
        generated_tokens=8,
        num_steps=4,
        num_draft_tokens=10,
        drafted_by_source=COUNTS.drafted,
        accepted_by_source=COUNTS.accepted,
        accepted_lengths=(0, 2, 1, 0),
    )
    block = {
        "mean_acceptance_length": 1.75,
        "num_spec_steps": 4,
        "acceptance_histogram": [2, 1, 1],
        "by_source": {
            "spectra": {"num_draft_tokens": 8, "num_accepted_tokens": 3},
            "model": {"num_draft_tokens": 2, "num_accepted_tokens": 0},
        },
    }
    assert from_metrics(metrics) == COUNTS
    told = from_block(block)
    assert (told.tau, told.lengths, told.drafted) == (COUNTS.tau, COUNTS.lengths, COUNTS.drafted)


def test_llama_cpp_tells_its_counts_only_where_it_drafted() -> None:
    counts = from_timings({"predicted_n": 8, "draft_n": 10, "draft_n_accepted": 3})
    assert counts is not None
    assert (counts.num_steps, counts.committed, counts.tau) == (4, 7, COUNTS.tau)
    assert counts.acceptance_rate == COUNTS.acceptance_rate
    assert total([counts, counts]).lengths == ()
    assert from_timings({"predicted_n": 8}) is None
    assert from_timings({"predicted_n": 8, "draft_n": 0}) is None


def test_figures_have_the_names_of_vllms_benchmark() -> None:
    """As `vllm bench serve --save-result` writes them (vLLM 0.32)."""
    counts = SpecCounts(
        num_steps=2, committed=4, drafted={"a": 8}, accepted={"a": 2}, lengths=(1, 0, 1)
    )
    record = replace(QUICK, counts=counts, num_prompt_tokens=11)
    fields = run_metrics([record], 1.0).serve_fields()
    assert fields["total_input_tokens"] == 11
    assert fields["total_token_throughput"] == 16.0
    assert fields["output_throughput"] == 5.0
    assert fields["mean_ttft_ms"] == 500.0
    assert fields["median_itl_ms"] == pytest.approx(150.0)
    assert fields["std_itl_ms"] == pytest.approx(50.0)
    assert fields["p99_e2el_ms"] == pytest.approx(800.0)
    assert fields["spec_decode_acceptance_rate"] == 25.0
    assert fields["spec_decode_acceptance_length"] == 2.0
    assert fields["spec_decode_per_position_acceptance_rates"] == [0.5, 0.5]
    assert run_metrics([QUICK], 1.0).serve_fields()["total_token_throughput"] is None
