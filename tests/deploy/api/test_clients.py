"""Programs that people use with other servers, set up as docs/clients.md says."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest
import yaml
from langchain_openai import ChatOpenAI
from support.fakes.fake_engine import FakeEngine
from support.servers.http_server import http_server

pytestmark = pytest.mark.net

TEXT = "def f(x):\n    return x\n"
KEY = "a-key-of-the-operator"


async def test_langchain_calls_and_streams(engine: FakeEngine) -> None:
    async with http_server(engine, api_keys=(KEY,)) as server:
        model = ChatOpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1",
            api_key=KEY,  # pyright: ignore[reportArgumentType]
            model="tiny",
            temperature=0,
            extra_body={"speculative": {"enabled": False}},
        )
        answer = await model.ainvoke("hi")
        assert answer.content == TEXT
        parts = [part async for part in model.astream("hi")]
    assert "".join(str(part.content) for part in parts) == TEXT
    assert parts[-1].usage_metadata is not None or answer.usage_metadata is not None


async def test_llm_streams(engine: FakeEngine, tmp_path: Path) -> None:
    async with http_server(engine, api_keys=(KEY,)) as server:
        model = {
            "model_id": "draftline",
            "model_name": "tiny",
            "api_base": f"http://127.0.0.1:{server.port}/v1",
            "api_key_name": "draftline",
        }
        (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump([model]))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "llm", "-m", "draftline", "hi", "--key", KEY, "--no-log",
            env=os.environ | {"LLM_USER_PATH": str(tmp_path)},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert (output.decode().rstrip(), errors.decode()) == (TEXT.rstrip(), "")
