"""Tokens between draftline's parts: how they are read, who is served, and what a server asks."""

from __future__ import annotations

import asyncio
import contextlib
import json
from argparse import ArgumentParser
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from draftline.actors import drafter_server, listener
from draftline.actors.drafter_server import DrafterServer
from draftline.actors.listener import add_listen_arguments, is_loopback, listen_settings
from draftline.cluster.config import DrafterConfig, EngineConfig
from draftline.cluster.drafting.hub import DrafterHub
from draftline.cluster.links import wire
from draftline.cluster.links.access import (
    Access,
    TlsFiles,
    drafter_tls,
    read_access,
    read_token,
    token_metadata,
)
from draftline.cluster.links.grpc_link import GrpcLink, GrpcOptions
from draftline.core.errors import ConfigError
from draftline.deploy.engine.placement import Placement
from support.fakes.fake_drafters import CountingDrafter
from support.servers.hub_session import LIMITS, HubSession
from support.servers.self_signed import self_signed_files

# Constant, since tests are named after them: workers must collect the same.
TOKEN, OTHER = "token-of-this-test-1", "token-of-this-test-2"


def test_each_line_is_a_token(tmp_path: Path):
    file = tmp_path / "tokens"
    # The star of earlier releases.
    file.write_text(f"# of the engine\n{TOKEN}\n\n{OTHER} *\n")
    access = read_access(None, str(file))
    assert access is not None
    tokens = (TOKEN, OTHER, "token-of-this-test-3", None)
    assert [access.allows(token_metadata(one)) for one in tokens] == [True, True, False, False]
    assert read_token(None, str(file)) == TOKEN
    file.write_text(f"{OTHER} *\n")
    assert read_token(None, str(file)) == OTHER


@pytest.mark.parametrize(
    "metadata",
    [None, (), (("authorization", TOKEN),), (("authorization", "Bearer "),), token_metadata(OTHER),
     (("x", f"Bearer {TOKEN}"),), (("authorization", f"Bearer {TOKEN}".encode()),)],
)  # fmt: skip
def test_no_other_metadata_is_a_token(metadata):
    assert not Access(TOKEN).allows(metadata)


def test_a_variable_is_read_once_and_not_left_to_children(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SERVER_TOKENS", TOKEN)
    assert read_access("SERVER_TOKENS", None) is not None
    with pytest.raises(ConfigError, match="token_env: the environment variable SERVER_TOKENS is"):
        read_access("SERVER_TOKENS", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no token"),
        ("# nothing\n", "holds no token"),
        ("short", "line 1: a token is 16 or more"),
        (f"{OTHER}\n{TOKEN} acme,bert", "line 2: namespaces of tokens were removed; write the tok"),
        (f"{TOKEN} * *", "line 1: namespaces of tokens were removed"),
    ],
)
def test_wrong_token_files_are_told_without_a_token(tmp_path: Path, text: str, message: str):
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(ConfigError, match=f"token_file: .*{message}") as caught:
        read_access(None, str(file))
    assert TOKEN not in str(caught.value)
    assert "short" not in str(caught.value)


def parsed(*arguments: str) -> dict[str, object]:
    parser = ArgumentParser()
    add_listen_arguments(parser)
    return listen_settings(parser.parse_args(arguments))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "box.example"])
def test_a_server_for_other_machines_needs_tokens(tmp_path: Path, host: str):
    with pytest.raises(ConfigError, match=rf"host: {host} .*--token-file .*--allow-unauth"):
        parsed("--host", host)
    assert parsed("--host", host, "--allow-unauthenticated")["access"] is None
    file = tmp_path / "tokens"
    file.write_text(TOKEN)
    assert parsed("--host", host, "--token-file", str(file))["access"] is not None


def test_loopback_needs_none():
    assert parsed()["access"] is None
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.0.1", "::1", "[::1]")))


def test_a_server_refuses_to_start_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = json.dumps({"kind": "prompt_lookup"})
    assert drafter_server.main(["--config", config, "--host", "0.0.0.0"]) == 2
    assert capsys.readouterr().err.count("--allow-unauthenticated") == 1
    file = tmp_path / "tokens"
    file.write_text(f"{TOKEN} acme")
    assert drafter_server.main(["--config", config, "--token-file", str(file)]) == 2
    assert "namespaces of tokens were removed" in capsys.readouterr().err


@pytest.mark.parametrize(("token", "is_served"), [(TOKEN, True), (OTHER, False), (None, False)])
async def test_a_drafter_server_serves_its_token_only(token: str | None, is_served: bool):
    async with drafter_server_for(TOKEN) as address:
        hub = DrafterHub([GrpcLink("far", address, GrpcOptions(token=token))], LIMITS)
        await hub.start()
        assert bool(await HubSession(hub).step(1)) == is_served
        await hub.stop()
        async with grpc.aio.insecure_channel(address) as channel:
            call = channel.stream_stream(wire.METHOD)(metadata=token_metadata(token))
            await call.write(wire.encode_hello(wire.Greeting("far")))
            if is_served:
                hello = wire.decode_hello(await anext(aiter(call)))
                assert hello.name == "far"
            else:
                with pytest.raises(grpc.aio.AioRpcError, match="token_env or token_file") as caught:
                    await anext(aiter(call))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_call_without_a_token_and_a_word_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listener, "FIRST_MESSAGE_S", 0.01)
    async with drafter_server_for(TOKEN) as address, grpc.aio.insecure_channel(address) as channel:
        silent = channel.stream_stream(wire.METHOD)()
        with pytest.raises(grpc.aio.AioRpcError, match="token_env or token_file"):
            await anext(aiter(silent))


@contextlib.asynccontextmanager
async def drafter_server_for(token: str) -> AsyncIterator[str]:
    server = DrafterServer(CountingDrafter("far"), access=Access(token))
    try:
        yield f"127.0.0.1:{await server.start()}"
    finally:
        await server.stop()


async def test_health_checks_need_no_token_and_tell_of_a_stop():
    server = DrafterServer(CountingDrafter("far"), access=Access(TOKEN))
    address = f"127.0.0.1:{await server.start()}"
    hub = DrafterHub([GrpcLink("far", address, GrpcOptions(token=TOKEN))], LIMITS)
    await hub.start()
    assert await HubSession(hub).step(1)
    async with grpc.aio.insecure_channel(address) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert await check(b"\x0a\x05any-1", timeout=30) == b"\x08\x01"
        # The open request holds it up.
        stopping = asyncio.create_task(server.stop(drain_s=60.0))
        await asyncio.sleep(0)
        assert await check(b"", timeout=30) == b"\x08\x02"
    await hub.stop()
    await stopping


async def test_a_configured_server_is_reached_with_tls_and_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = self_signed_files(tmp_path)
    server = DrafterServer(CountingDrafter("far"), tls=files, access=Access(TOKEN))
    monkeypatch.setenv("FAR_TOKEN", TOKEN)
    config = DrafterConfig(
        kind="suffix",
        name="far",
        transport="grpc",
        # The certificate names localhost.
        address=f"127.0.0.1:{await server.start()}",
        tls_ca=files.ca,
        tls_certificate=files.certificate,
        tls_key=files.key,
        tls_server_name="localhost",
        token_env="FAR_TOKEN",
    )
    placement = Placement(EngineConfig(model="demo", drafters=[config]))
    hub = DrafterHub(await placement.make_drafters(), LIMITS)
    await hub.start()
    assert await HubSession(hub).step(1)
    await hub.stop()
    await server.stop()


FAR = {"kind": "suffix", "transport": "grpc", "address": "127.0.0.1:1"}


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (FAR | {"token_env": "NO_SUCH_VARIABLE"}, r"drafters\[0\]\.token_env: the environment"),
        (FAR | {"token_file": "/nowhere/token"}, r"drafters\[0\]\.token_file: cannot read"),
        (FAR | {"tls_ca": "/nowhere/ca.pem"}, r"drafters\[0\]\.tls\.ca: cannot read"),
        (FAR | {"tls_key": "key.pem"}, "tls_certificate and tls_key go together"),
        (FAR | {"token_env": "A", "token_file": "b"}, "leave one of them out"),
        ({"kind": "suffix", "token_env": "A"}, "token_env: needs address: which"),
        ({"kind": "suffix", "tls_ca": "ca.pem"}, "tls_ca: needs transport: grpc"),
        ({"kind": "suffix", "transport": "grpc", "tls_ca": "c"}, "child process on loopback"),
    ],
)
async def test_wrong_credentials_name_the_setting(drafter: dict[str, str], message: str):
    async def start() -> None:
        await Placement(EngineConfig.model_validate({"drafters": [drafter]})).make_drafters()

    with pytest.raises(ConfigError, match=message):
        await start()


def test_server_name_is_no_certificate():
    assert TlsFiles(server_name="a").channel_options() == [("grpc.ssl_target_name_override", "a")]
    assert drafter_tls(DrafterConfig(kind="suffix")) is None
