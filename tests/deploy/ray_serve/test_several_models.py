"""Two models in one Ray Serve application: texts, tenants, routers and scaling of each."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from draftline import Engine, EngineConfig, SamplingParams
from draftline.deploy.settings.tenants import key_digest
from support.fakes.fake_engine import byte_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

# Ray Serve's modules warn when they are imported, so they are imported in here.
pytestmark = pytest.mark.filterwarnings("ignore")

PARAMS = {"max_tokens": 40, "temperature": 0.9, "seed": 3, "ignore_eos": True}
PROMPT = "abc def abc"
OPERATOR, ACME = {"authorization": "Bearer operator"}, {"authorization": "Bearer acme"}
TIMEOUT_S = 200.0


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tiny model, which answers otherwise."""
    folder = tmp_path_factory.mktemp("other")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def settings(first: Path, second: Path) -> dict[str, Any]:
    scaling = {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1.2,
        "upscale_delay_s": 0.5, "downscale_delay_s": 600.0, "look_back_period_s": 2.0,
        "metrics_interval_s": 0.5,
    }  # fmt: skip
    tenants = [{"name": "acme", "key_sha256": key_digest("acme"), "models": ["second"]}]
    return {
        "backend": "local", "kv_cache_tokens": 2048, "block_size": 4,
        "server": {"api_key_sha256": [key_digest("operator")], "tenants": tenants},
        "deployment": {"coordinator_cpus": 0.5, "ingress_cpus": 0.5},
        "models": [
            {"model": str(first), "served_model_name": "first"},
            {
                "model": str(second), "served_model_name": "second",
                "deployment": {"autoscaling_config": scaling},
            },
        ],
    }  # fmt: skip


def plain_text(model: Path) -> str:
    with Engine(EngineConfig(model=str(model))) as engine:
        [answer] = engine.generate([PROMPT], SamplingParams(**PARAMS))  # pyright: ignore[reportArgumentType]
        return answer.text


def answer(client: httpx.Client, model: str, key: Mapping[str, str] = OPERATOR) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, **PARAMS}
    return client.post("/v1/completions", json=body, headers=key)


def replicas() -> dict[str, int]:
    """Running replicas of each deployment."""
    from ray import serve

    deployments = serve.status().applications["draftline"].deployments
    return {
        name: deployment.replica_states.get("RUNNING", 0)
        for name, deployment in deployments.items()
    }


@pytest.mark.cluster
@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_models_in_one_application(checkpoint: Path, other: Path, ray_serve_url: str) -> None:
    from draftline.deploy.ray_serve.serve_app import build_app
    from ray import serve

    expected = {"first": plain_text(checkpoint), "second": plain_text(other)}
    assert expected["first"] != expected["second"]
    serve.run(build_app(settings(checkpoint, other)), name="draftline")
    assert replicas() == {"ingress": 1, "engine-first": 1, "engine-second": 1}
    with httpx.Client(base_url=ray_serve_url, timeout=120) as client:
        cards = client.get("/v1/models", headers=OPERATOR).json()["data"]
        assert {card["id"]: card["max_model_len"] for card in cards} == {
            "first": 256,
            "second": 128,
        }
        texts = {
            name: answer(client, name).raise_for_status().json()["choices"][0]["text"]
            for name in ("first", "second", "first")
        }
        assert texts == expected
        assert answer(client, "third").status_code == 404
        assert [answer(client, name, ACME).status_code for name in expected] == [403, 200]
        page = client.get("/metrics", headers=OPERATOR).text
        routed = dict(
            re.findall(
                r'^draftline:routed_prompt_tokens_total{.*model_name="(\w+)"} (\S+)', page, re.M
            )
        )
        assert {name: float(count) for name, count in routed.items()} == {
            "first": 2.0 * len(PROMPT), "second": 2.0 * len(PROMPT),
        }  # fmt: skip
        # The second time its prefix was there.
        assert re.search(r'routed_prefix_tokens_total{.*model_name="first"} 8.0', page)
        scaled_by_its_own_load(client, expected["second"])


def scaled_by_its_own_load(client: httpx.Client, text: str) -> None:
    """Requests to the second model add replicas to it alone."""
    done = threading.Event()

    def ask() -> set[str]:
        seen = set()
        while not done.is_set():
            given = answer(client, "second").raise_for_status()
            seen.add(given.json()["choices"][0]["text"])
        return seen

    with ThreadPoolExecutor() as pool:
        asking = [pool.submit(ask) for _ in range(3)]
        try:
            deadline = time.monotonic() + TIMEOUT_S
            while replicas()["engine-second"] < 2:
                assert time.monotonic() < deadline, replicas()
                time.sleep(0.2)
            assert replicas()["engine-first"] == 1
        finally:
            done.set()
        assert {text for one in asking for text in one.result(120)} == {text}
