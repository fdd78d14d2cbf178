"""The API over a fake engine, in process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from draftline.deploy.api.app import create_app
from draftline.deploy.api.engine_client import LocalEngineClient
from draftline.deploy.settings.settings import ServerConfig
from support.fakes.fake_engine import FakeEngine, byte_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig

MODEL = "tiny"


@asynccontextmanager
async def serve(engine: FakeEngine, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the API of `engine`; `options` are those of `ServerConfig`."""
    engine_client = LocalEngineClient(engine)  # pyright: ignore[reportArgumentType]
    app = create_app(engine_client, ServerConfig(**options), MODEL)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test") as client,
    ):
        yield client


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with serve(engine) as client:
        yield client


@pytest.fixture
def serving() -> Callable[..., Any]:
    return serve


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model over bytes, with its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
