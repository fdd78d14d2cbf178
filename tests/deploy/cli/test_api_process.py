"""What an API process is told at its start."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from draftline.cluster.transport.messages import encode_frame
from draftline.core.errors import ProtocolError
from draftline.deploy.cli.serve.api_process import packed_settings, read_settings, receive_setup
from draftline.deploy.engine_process.messages import EngineSetup, StartDrain, encode_messages
from draftline.deploy.settings.settings import build_serve_args


def test_settings_arrive_as_they_were_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("of-a-file\n")
    monkeypatch.setenv("TENANTS_KEY", "of-the-tenant")
    args = build_serve_args(
        {
            "model": "demo",
            "drafters": [{"kind": "suffix"}, {"kind": "spectra", "name": "s", "pool": False}],
            "trace_steps": str(tmp_path / "trace"),
            "server": {
                "api_keys": ["of-the-operator"],
                "api_key_file": [str(keys)],
                "tenants": [{"name": "acme", "key_env": "TENANTS_KEY", "learn": False}],
                "limits": {"max_prompts": 3},
                "api_processes": 2,
            },
        }
    )
    data = packed_settings(args)
    for secret in ("of-the-operator", "of-a-file", "of-the-tenant"):
        assert secret not in data.decode()
    # They were read where the server was started.
    keys.unlink()
    monkeypatch.delenv("TENANTS_KEY")
    found = read_settings(data)
    assert found.engine == args.engine
    assert found.model_name == args.model_name
    assert found.server.api_key_sha256 == args.server.api_key_sha256
    assert len(found.server.api_key_sha256) == 2
    assert found.server.tenants[0].key_sha256 == args.server.tenants[0].key_sha256
    assert not found.server.tenants[0].learn
    assert (found.server.limits.max_prompts, found.server.api_processes) == (3, 2)
    assert json.loads(data)["server"]["api_key_file"] == []


def test_the_first_message_is_the_setup() -> None:
    for messages, is_setup in (([EngineSetup(b"{}", 30)], True), ([StartDrain()], False)):
        here, there = socket.socketpair()
        with here, there:
            here.sendall(encode_frame(encode_messages(messages)))
            if is_setup:
                assert receive_setup(there) == messages[0]
                continue
            with pytest.raises(ProtocolError):
                receive_setup(there)
    here, there = socket.socketpair()
    with there:
        here.close()
        with pytest.raises(EOFError):
            receive_setup(there)
