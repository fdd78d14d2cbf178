"""The files of the page at /ui: open to all, and closed to what is not theirs."""

from __future__ import annotations

import re
from typing import Any

import pytest
from draftline.deploy.api.routes.operations import LIVE_PAGE_FILES as FILES
from draftline.deploy.api.routes.operations import LIVE_PAGE_FOLDER as FOLDER
from support.fakes.fake_engine import FakeEngine

# What a page could load or send elsewhere; namespaces of XML are names.
ADDRESS = re.compile(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z0-9.]+\.[a-z]", re.I)


async def test_files_need_no_key_and_data_does(serving: Any) -> None:
    async with serving(FakeEngine(), api_keys=("key",)) as client:
        for path, file in FILES.items():
            answer = await client.get(path)
            assert (answer.status_code, answer.content) == (200, file.read_bytes())
            assert (await client.head(path)).status_code == 200
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
        for path in ("/ui/none.js", "/ui/../app.py", "/server_info", "/metrics", "/v1/models"):
            assert (await client.get(path)).status_code == 401
        assert (await client.post("/ui")).status_code == 405


async def test_the_page_can_be_left_out(serving: Any) -> None:
    async with serving(FakeEngine(), live_page=False) as client:
        assert [(await client.get(path)).status_code for path in FILES] == [404] * len(FILES)
    async with serving(FakeEngine(), live_page=False, api_keys=("key",)) as client:
        assert (await client.get("/ui")).status_code == 401


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_files_load_nothing_from_elsewhere(file: Any) -> None:
    text = file.read_text("utf-8")
    assert not ADDRESS.findall(text)
    # The policy forbids what stands in the page itself.
    assert not re.findall(r"<style|style=|<script(?! type=\"module\" src=)|\son\w+=", text)


def test_every_file_of_the_folder_is_served() -> None:
    assert sorted(FILES.values()) == sorted(FOLDER.iterdir())
    page = (FOLDER / "index.html").read_text("utf-8")
    assert set(re.findall(r"(?:href|src)=\"(ui/[^\"]+)\"", page)) <= {
        path.removeprefix("/") for path in FILES
    }
