"""Two tenants over HTTP, a real engine and a folder: what each learns speeds up its own answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.retrieval import model_fingerprint
from draftline.core.request.sampling_params import RequestOptions, SamplingParams
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.engine.async_engine import AsyncEngine
from draftline.deploy.engine.engine import Engine
from draftline.deploy.settings.settings import ServerConfig
from draftline.deploy.settings.tenants import key_digest
from draftline.retrieval_store.delta.settings import LearningSettings
from draftline.retrieval_store.learning import forget_namespace
from draftline.retrieval_store.serving.open_store import open_delta_log, open_eraser, open_policy
from prometheus_client.parser import text_string_to_metric_families

PROMPT = "class Turtle:\n    def __init__(self, name, shell):\n        self.name = name\n        "


@dataclass(frozen=True, slots=True)
class Answered:
    """A text, and what the retrieval drafter had to do with it."""

    text: str
    drafted: int
    accepted: int


class Client:
    """Sends the same prompt with the key of one caller or another."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def ask(self, caller: str, *, store: bool = True, plain: bool = False) -> Answered:
        body = {"prompt": PROMPT, "max_tokens": 48, "temperature": 0, "store": store}
        response = await self._http.post(
            "/v1/completions",
            json=body | {"speculative": {"enabled": not plain}},
            headers={"Authorization": f"Bearer {caller}"},
        )
        answer = response.raise_for_status().json()
        counts = answer["metrics"]["speculative_decoding"]["by_source"].get("retrieval", {})
        return Answered(
            answer["choices"][0]["text"],
            counts.get("num_draft_tokens", 0),
            counts.get("num_accepted_tokens", 0),
        )

    async def outcomes(self) -> dict[str, float]:
        """What became of the requests so far, as the metrics tell; no zeros."""
        response = await self._http.get("/metrics", headers={"Authorization": "Bearer operator"})
        families = text_string_to_metric_families(response.raise_for_status().text)
        return {
            sample.labels["outcome"]: sample.value
            for family in families
            for sample in family.samples
            if sample.name == "draftline:learning_requests_total" and sample.value
        }

    async def until_counted(self, outcome: str, count: int) -> None:
        for _ in range(600):
            if (await self.outcomes()).get(outcome) == count:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{outcome} never came to {count}: {await self.outcomes()}")

    async def until_drafted(self, caller: str) -> Answered:
        """An answer with drafts from its first step on; nothing is learned of it."""
        for _ in range(600):
            if (await self.ask(caller, store=False)).drafted:
                return await self.ask(caller, store=False)
            await asyncio.sleep(0.05)
        raise AssertionError("nothing was ever drafted")

    async def until_undrafted(self, caller: str) -> Answered:
        """An answer without drafts. All before it may be learned."""
        for _ in range(600):
            answer = await self.ask(caller)
            if not answer.drafted:
                return answer
            await asyncio.sleep(0.05)
        raise AssertionError("it was drafted to the end")


@asynccontextmanager
async def served(store: Path) -> AsyncIterator[Client]:
    drafter = DrafterConfig(kind="retrieval", store=str(store), learn=True)
    config = EngineConfig(model="demo", drafters=(drafter,), node_budget="full")
    tenants = [{"name": name, "key_sha256": key_digest(name)} for name in ("a", "b")]
    tenants += [{"name": "quiet", "key_sha256": key_digest("quiet"), "learn": False}]
    server = ServerConfig(api_keys=("operator",), tenants=tenants)  # pyright: ignore[reportArgumentType]
    app = create_app(LocalEngineClient(AsyncEngine(config)), server, "demo")
    transport = httpx.ASGITransport(app)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http,
    ):
        yield Client(http)


def learned_namespaces(store: Path) -> set[str]:
    return {path.name for path in store.glob(".delta/*/")}


async def test_each_tenant_is_drafted_for_from_its_own_answers(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with served(store) as client:
        plain = await client.ask("operator", plain=True)
        first = await client.ask("a")
        await client.until_counted("learned", 1)
        again = await client.until_drafted("a")
        assert (first.drafted, plain.drafted) == (0, 0)
        assert again.accepted > 30
        # By now a's text is in memory, and b asks for the very same.
        other = await client.ask("b")
        nobodys = await client.ask("operator")
        assert (other.drafted, nobodys.drafted) == (0, 0)
        await client.until_counted("learned", 2)
        assert learned_namespaces(store) == {"a", "b"}
        own = await client.until_drafted("b")
        assert own.accepted == again.accepted
        texts = {one.text for one in (plain, first, again, other, nobodys, own)}
        assert texts == {plain.text}


async def test_what_may_not_be_learned_is_not(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with served(store) as client:
        answers = [await client.ask("quiet") for _ in range(2)]
        answers += [await client.ask("b", store=False) for _ in range(2)]
        answers += [await client.ask("operator")]
        await client.until_counted("unstored", 4)
        await client.until_counted("shared", 1)
        # What is learned meanwhile tells that all before it was looked at.
        await client.ask("a")
        await client.until_counted("learned", 1)
        await client.until_drafted("a")
        answers += [await client.ask("quiet"), await client.ask("b", store=False)]
        assert [one.drafted for one in answers] == [0] * 7
        assert len({one.text for one in answers}) == 1
        assert learned_namespaces(store) == {"a"}


async def test_what_is_forgotten_while_it_is_asked_for_stays_so(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with served(store) as client:
        await client.ask("a")
        await client.until_counted("learned", 1)
        drafted = await client.until_drafted("a")
        running = [asyncio.create_task(client.ask("a")) for _ in range(3)]
        await asyncio.sleep(0)
        eraser = open_eraser(str(store))
        policy = open_policy(str(store), writes=True)
        await asyncio.to_thread(forget_namespace, eraser, "a", policy)
        ended = await asyncio.gather(*running)
        after = await client.until_undrafted("a")
        assert eraser.remains("a") == []
        assert {one.text for one in (drafted, *ended, after)} == {drafted.text}
        assert (await client.outcomes())["off"] > 0


def test_a_closed_engine_has_learned_its_last_answer_and_leaves_no_thread(tmp_path: Path) -> None:
    drafter = DrafterConfig(kind="retrieval", store=str(tmp_path), learn=True)
    before = set(threading.enumerate())
    with Engine(EngineConfig(model="demo", drafters=[drafter])) as engine:
        (answer,) = engine.generate(
            [PROMPT], SamplingParams(max_tokens=8), RequestOptions(namespace="tenant")
        )
    left = {one.name for one in set(threading.enumerate()) - before}
    assert not {name for name in left if name.startswith("retrieval")}
    log = open_delta_log(str(tmp_path), model_fingerprint("demo"), LearningSettings())
    (event,) = log.read("tenant")
    assert event.event.tokens is not None
    assert tuple(event.event.tokens[-8:].tolist()) == tuple(answer.token_ids)
