"""What the records of a trace say agrees with what requests got; and nothing costs anything off."""

from __future__ import annotations

from collections import Counter
from itertools import count

from draftline.core.request.output import TARGET_SOURCE, Delta
from draftline.core.step.trace import StepRecord, StepTrace
from support.fakes.fake_bench import Bench


async def run_traced(**options: int) -> tuple[Bench, list[StepRecord]]:
    """Three requests over the fakes; the clock counts how often it was read."""
    records: list[StepRecord] = []
    ticks = count(1)
    bench = Bench(trace=StepTrace(lambda: float(next(ticks)), records.append), **options)
    for name in ("a", "bb", "ccc"):
        bench.add(name, [1, 2, 3] * 12, 20)
    await bench.run()
    return bench, records


async def test_records_add_up_to_what_requests_got() -> None:
    bench, records = await run_traced(seed=5, num_groups=2)
    deltas = [
        event for heard in bench.heard.values() for event in heard if isinstance(event, Delta)
    ]
    metrics = [delta.metrics for delta in deltas if delta.metrics is not None]
    sources = Counter(source for delta in deltas for source in delta.sources)
    accepted, verified = Counter[str](), Counter[str]()
    for record in records:
        accepted.update(record.accepted_by_source)
        verified.update(record.nodes_by_source)
    assert sum(record.first_tokens for record in records) == 3
    assert sum(record.tokens for record in records) == 3 * 19
    assert accepted == sources - Counter({TARGET_SOURCE: sources[TARGET_SOURCE]})
    assert accepted.total() == sum(record.accepted_nodes for record in records) > 0
    assert verified == sum((Counter(found.drafted_by_source) for found in metrics), Counter())
    assert sum(record.requests for record in records) == sum(found.num_steps for found in metrics)


async def test_records_describe_the_steps_that_were_submitted() -> None:
    # Every drafter is asked.
    bench, records = await run_traced(rows=20, is_adaptive=False)
    steps = bench.target.steps
    assert all(step.is_traced for step in steps)
    assert [record.step for record in records] == [step.step_id for step in steps]
    for record, step in zip(records, steps, strict=True):
        assert record.rows == len(step.token_ids)
        assert record.requests == sum(tree is not None for tree in step.trees)
        assert record.rows == record.prompt_rows + record.requests + record.tree_nodes
        times = (record.planned_at, record.submitted_at, record.answered_at, record.committed_at)
        assert times == tuple(sorted(set(times)))
    asked = {record.drafters for record in records if record.tree_nodes}
    assert asked == {("first", "second")}
    assert any(record.prompt_rows and record.requests for record in records)


async def test_steps_are_not_traced_unless_asked() -> None:
    bench = Bench()
    bench.add("a", [1, 2, 3], 5)
    await bench.run()
    assert bench.target.steps
    assert not any(step.is_traced for step in bench.target.steps)
