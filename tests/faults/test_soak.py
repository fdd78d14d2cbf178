"""Hundreds of mixed requests, little memory, cancels and dying drafters: no text changes.

The requests differ in parameters, priorities, salts and drafters, share prefixes, arrive at random
and are cut off at random, while their KV is taken from one another and drafter servers are killed
again and again. Small models draft in every way there is: of the target's tokenizer and of others,
in a pool of servers, and two of them into one tree.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
import torch
from draftline import AsyncEngine, DrafterConfig, EngineConfig, SamplingParams
from draftline.benchmarks.lossless.matrix import OF_MODELS
from draftline.benchmarks.lossless.sampling_matrix import PARAMETERS
from draftline.benchmarks.peers.transformers_peer import TransformersPeer
from draftline.cluster.engine.assembly import plan_model
from draftline.core.request.output import RequestOutput
from draftline.core.request.sampling_params import RequestOptions
from draftline.deploy.cli.demo.prompts import held_out_prompts
from draftline.measure.runs.near_tie import Judge
from support.servers.processes import drafter_pids

NUM_CASES = 24
MAX_WAITING = 48
SYSTEM_TOKENS = 48
MODELS = [
    DrafterConfig(kind="model", model="demo-drafter", transport="grpc", servers=2),
    *(OF_MODELS[name] for name in ("tli", "slem")),
]
CONFIG = EngineConfig(
    model="demo",
    pipeline_parallel_size=2,
    drafters=[
        DrafterConfig(kind="spectra"),
        DrafterConfig(kind="prompt_lookup", transport="grpc"),
        DrafterConfig(kind="retrieval", store="demo"),
        *MODELS,
    ],
    # Fewer slots than the running requests want, so that they preempt one another.
    kv_cache_tokens=448,
    max_model_len=256,
    max_num_seqs=12,
    max_queued_requests=2 * MAX_WAITING,
    max_num_batched_tokens=96,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A request and its answer by plain decoding, alone."""

    prompt: list[int]
    params: SamplingParams
    plain: RequestOutput


@pytest.fixture
async def engine(num_stages: int) -> AsyncIterator[AsyncEngine]:
    torch.set_num_threads(1)
    # Over two stages everyone is asked whatever it costs; else who is asked depends on the machine.
    budget = "full" if num_stages > 1 else "adaptive"
    changes = {"pipeline_parallel_size": num_stages, "node_budget": budget}
    engine = AsyncEngine(CONFIG.model_copy(update=changes))
    await engine.start()
    yield engine
    await engine.close()


async def make_cases(engine: AsyncEngine, rng: random.Random) -> list[Case]:
    names = list(PARAMETERS)
    texts = [engine.tokenizer.encode(prompt.text) for prompt in held_out_prompts(8)]
    cases = []
    for index in range(NUM_CASES):
        own = rng.choice(texts)[: rng.randint(4, 90)]
        prompt = [*texts[0][:SYSTEM_TOKENS], *own] if rng.random() < 0.7 else own
        values = {"ignore_eos": True, **PARAMETERS[names[index % len(names)]]}
        params = SamplingParams(max_tokens=rng.randint(24, 72), **values)  # type: ignore[arg-type]
        plain = await engine.generate(prompt, params, RequestOptions(speculative=False))
        cases.append(Case(prompt, params, plain))
    return cases


def random_options(rng: random.Random) -> RequestOptions:
    names = [drafter.source for drafter in CONFIG.drafters]
    models = [drafter.source for drafter in MODELS]
    pairs = tuple(rng.sample(names, 2)), tuple(rng.sample(models, 2))
    return RequestOptions(
        speculative=rng.random() < 0.9,
        priority=rng.choice((0, 0, 0, -1, 1)),
        cache_salt=rng.choice(("", "", "tenant")),
        max_nodes=rng.choice((None, None, 0, 3)),
        drafters=rng.choice((None, None, *pairs)),
    )


async def run_one(
    engine: AsyncEngine, case: Case, options: RequestOptions, cut_after: int | None
) -> list[int]:
    """Tokens of the answer, up to where the client leaves."""
    tokens: list[int] = []
    stream = engine.stream(case.prompt, case.params, options)
    async for delta in stream:
        tokens += delta.token_ids
        if cut_after is not None and len(tokens) >= cut_after:
            await stream.aclose()
            return tokens
    return tokens


async def kill_drafters(rng: random.Random) -> int:
    """Kills one drafter server after the other, also such as start again; until cancelled."""
    killed = 0
    try:
        while True:
            await asyncio.sleep(rng.uniform(2.0, 6.0))
            if pids := sorted(drafter_pids()):
                os.kill(pids[killed % len(pids)], signal.SIGKILL)
                killed += 1
    except asyncio.CancelledError:
        return killed


@pytest.mark.net
@pytest.mark.timeout(600)
@pytest.mark.full
# One stage decodes several tokens a step where nobody drafts.
@pytest.mark.parametrize(("num_requests", "num_stages"), [(520, 2), (520, 1)])
async def test_nothing_changes_a_text_and_nothing_is_lost(
    engine: AsyncEngine, num_requests: int, num_stages: int
) -> None:
    rng = random.Random(20)
    cases = await make_cases(engine, rng)
    room = asyncio.Semaphore(MAX_WAITING)

    async def send(index: int) -> tuple[Case, list[int], int | None]:
        case, options = cases[index % NUM_CASES], random_options(rng)
        cut_after = rng.randint(1, 12) if rng.random() < 0.15 else None
        async with room:
            await asyncio.sleep(rng.expovariate(20.0))
            return case, await run_one(engine, case, options, cut_after), cut_after

    killer = asyncio.create_task(kill_drafters(rng))
    answers = await asyncio.gather(*(send(index) for index in range(num_requests)))
    killer.cancel()
    assert await killer > 0, "no drafter was ever killed"

    stats = engine.stats()
    silent = [drafter for drafter in stats.drafters if not drafter.proposals]
    assert not (silent and num_stages > 1)
    assert stats.num_preemptions > 0
    assert stats.num_prefix_hits > 0
    assert sum(cut is not None for _, _, cut in answers) > num_requests // 20
    check_texts(answers)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)


def check_texts(answers: list[tuple[Case, list[int], int | None]]) -> None:
    """Every answer is that of plain decoding, or its beginning where the client left."""
    target = TransformersPeer("demo").target
    judge = Judge(target, plan_model(CONFIG).request_factory())
    near_ties = 0
    for case, tokens, cut in answers:
        expected = list(case.plain.token_ids)
        expected = expected if cut is None else expected[: len(tokens)]
        params = replace(case.params, logprobs=None, prompt_logprobs=None)
        for parting in judge.partings([case.prompt], [expected], [tokens], params):
            assert parting.is_near_tie, parting
            near_ties += 1
    assert near_ties <= 3
