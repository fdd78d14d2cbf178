"""The socket that the server listens on."""

from __future__ import annotations

import asyncio
import socket
import sys

import pytest
from draftline.core.errors import ConfigError
from draftline.deploy.cli import main as cli
from draftline.deploy.cli.serve.listening import UNASKED_FOR, bind, free_port, listen
from draftline.deploy.settings.settings import ServerConfig


async def test_answers_never_wait_for_a_clients_acknowledgement() -> None:
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = bind(ServerConfig(host="127.0.0.1", port=0))
    async with await asyncio.start_server(serve, sock=listener):
        _, writer = await asyncio.open_connection(*listener.getsockname())
        assert await accepted == 1
        writer.close()


def at(port: int) -> ServerConfig:
    return ServerConfig(host="127.0.0.1", port=port)


def test_a_port_is_taken_before_its_server_listens() -> None:
    """Of two servers that load at the same time, the second hears of the first at once."""
    with bind(at(0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind(at(port))
        # As before, while it loads.
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        listen(first)
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            bind(at(port))
    bind(at(port)).close()


def test_connections_of_a_server_that_has_ended_do_not_take_its_port() -> None:
    with bind(at(0)) as first:
        port = first.getsockname()[1]
        listen(first)
        with socket.create_connection(("127.0.0.1", port)) as client:
            server, _ = first.accept()
            # Who ends a connection first waits for what of it may still come.
            server.close()
            assert client.recv(1) == b""
    bind(at(port)).close()


@pytest.mark.parametrize(
    "arguments",
    [["--api-processes", "0"], ["--api-processes", "1"], ["--backend", "ray"]],
    ids=lambda arguments: arguments[-1],
)
def test_a_taken_port_is_told_before_anything_is_loaded(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with bind(at(0)) as other:
        port = other.getsockname()[1]
        listen(other)
        # Nobody looks for the model: it would be what is wrong.
        arguments = ["serve", "no/such/model", "--port", str(port), *arguments]
        monkeypatch.setattr(sys, "argv", ["draftline", *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.err == (
        f"error: server.port: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )
    assert not printed.out


def test_a_port_that_is_bound_later_is_none_that_others_get_unasked() -> None:
    assert free_port(ServerConfig(host="127.0.0.1", port=0)) in UNASKED_FOR
    with bind(ServerConfig(host="127.0.0.1", port=0)) as taken:
        listen(taken)
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            free_port(ServerConfig(host="127.0.0.1", port=port))
