"""The page at /ui in a real browser: by keyboard alone, on a phone, dark and light."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import pytest
from draftline.core.request.output import Delta
from draftline.core.request.sampling_params import RequestOptions, SamplingParams
from support.fakes.fake_engine import FakeEngine
from support.servers.browser import CONTROL, Page, browser
from support.servers.http_server import http_server

pytestmark = [pytest.mark.browser, pytest.mark.net, pytest.mark.timeout(300)]

TEXT = "def f(x):\n    return x\n"
BY_ID = "document.getElementById('{}')"
ROLES = {"button", "checkbox", "radio", "slider", "spinbutton", "textbox"}
# WCAG's contrast of two opaque colours, of an element's text and its nearest background.
CONTRAST = """
(() => {
  const rgb = (css) => css.match(/[\\d.]+/g).map(Number);
  const light = (css) => rgb(css).slice(0, 3).map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (one) => {
    for (let at = one; at; at = at.parentElement) {
      const own = getComputedStyle(at).backgroundColor;
      if (own.startsWith("rgb(")) return own;
    }
  };
  const texts = document.querySelectorAll("p, label, h1, h2, h3, dt, dd, pre, th, td, button");
  return Math.min(...[...texts]
    .filter((one) => one.offsetParent && one.textContent.trim() && !one.disabled)
    .map((one) => [light(getComputedStyle(one).color), light(behind(one))].sort((a, b) => b - a))
    .map(([more, less]) => (more + 0.05) / (less + 0.05)));
})()
"""


class TwoAnswers(FakeEngine):
    """Plain decoding answers otherwise: what must never happen, and must be told."""

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        options: RequestOptions,
        *,
        request_id: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        engine = FakeEngine() if options.speculative else FakeEngine("def f(y):\n    return y\n")
        async for delta in engine.stream(prompt, params, options, request_id=request_id):
            yield delta


async def on_page(engine: FakeEngine, what: Any, **options: Any) -> None:
    """Call `what` with a page and the server's address, beside the server's loop."""

    def visit(port: int) -> None:
        with browser() as page:
            page.show(1280)
            what(page, f"http://127.0.0.1:{port}/ui")

    async with http_server(engine, **options) as server:
        await asyncio.to_thread(visit, server.port)


def text_of(page: Page, name: str) -> str:
    return page.evaluate(f"{BY_ID.format(name)}.textContent")


def enter_by_key(page: Page, url: str) -> None:
    page.open(url)
    page.wait_for("document.activeElement.id === 'key'")
    page.write("wrong")
    page.press("Enter")
    page.wait_for(f"{BY_ID.format('alert')}.textContent.includes('wrong API key')")
    page.write("operator")
    page.press("Enter")
    page.wait_for(f"!{BY_ID.format('page')}.hidden")
    assert text_of(page, "alert") == ""
    assert page.evaluate("sessionStorage.getItem('draftline-key')") == "operator"


def tab_to(page: Page, name: str) -> None:
    """Press Tab until an element has the focus, which must show."""
    for _ in range(60):
        page.press("Tab")
        if page.evaluate("document.activeElement.id") == name:
            style = "getComputedStyle(document.activeElement)"
            assert page.evaluate(f"{style}.outlineStyle") == "solid"
            return
    raise AssertionError(f"Tab never comes to {name}")


def continue_a_text(page: Page) -> None:
    """The page begins with chats, as the model has a template."""
    kind = "document.querySelector('[name=kind][value={}]')"
    assert page.evaluate(f"{kind.format('chat')}.checked")
    page.evaluate(f"{kind.format('completion')}.click()")


def run(page: Page, max_tokens: int = 64) -> None:
    page.evaluate(f"{BY_ID.format('max-tokens')}.value = {max_tokens}")
    page.press("Enter", CONTROL)
    page.wait_for(f"/^Done|Failed/.test({BY_ID.format('status')}.textContent)")


async def test_a_run_by_keyboard_alone() -> None:
    await on_page(FakeEngine(), watch_a_run, api_keys=("operator",))


def watch_a_run(page: Page, url: str) -> None:
    enter_by_key(page, url)
    continue_a_text(page)
    tab_to(page, "prompt")
    page.write("more ")
    run(page)
    prompt = page.evaluate(f"{BY_ID.format('prompt')}.value")
    assert "more " in prompt
    for name in ("drafted", "plain"):
        assert text_of(page, name) == prompt + TEXT
    assert text_of(page, "verdict").startswith("\u2713 The same 23 tokens")
    tokens = "[...document.querySelectorAll('#drafted .token')]"
    sources = page.evaluate(f"{tokens}.map((token) => token.dataset.source)")
    assert sources == [*["spectra", "target"] * 11, "target"]
    # Sources differ in more than colour.
    lines = f"{tokens}.slice(0, 2).map((token) => getComputedStyle(token).textDecorationLine)"
    assert page.evaluate(lines) == ["underline", "none"]
    figures = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('#drafted-figures div')]"
        ".map((box) => [...box.children].map((part) => part.textContent)))"
    )
    assert (figures["tokens"], figures["steps"], figures["tau"]) == ("23", "11", "2.00")
    walk_through_the_steps(page)
    page.wait_for("[...document.querySelectorAll('#sources tr')].some((row) => "
                  "/spectra.*11 \\(48 %\\)3330 %/.test(row.textContent))")  # fmt: skip
    assert [error for error in page.errors if "401" not in error] == []


def walk_through_the_steps(page: Page) -> None:
    assert text_of(page, "tree-caption").startswith("Step 11: 3 nodes (1 of suffix, 2 of spectra)")
    tab_to(page, "step")
    page.press("ArrowLeft")
    assert text_of(page, "tree-caption").endswith(
        "1 accepted; drafting 250.0 ms, verifying 500.0 ms. Committed: \u2423 x"
    )
    assert not page.evaluate(f"{BY_ID.format('follow')}.checked")
    # The root, three nodes and the target's own token, of which three are the text.
    assert page.evaluate("document.querySelectorAll('#tree .node').length") == 5
    assert page.evaluate("document.querySelectorAll('#tree .node.taken').length") == 3
    assert page.evaluate("document.querySelectorAll('#drafted .token.now').length") == 2
    page.evaluate("document.querySelector('#legend button:nth-child(2)').focus()")
    page.press(" ")
    assert page.evaluate("document.querySelectorAll('#drafted.alone .chosen').length") == 11


async def test_a_text_that_differs_is_told() -> None:
    def watch(page: Page, url: str) -> None:
        page.open(url)
        page.wait_for(f"!{BY_ID.format('page')}.hidden")
        continue_a_text(page)
        tab_to(page, "prompt")
        run(page)
        assert text_of(page, "verdict") == "\u2717 The texts differ from token 6 on"

    await on_page(TwoAnswers(), watch)


async def test_an_error_is_told_and_the_page_goes_on() -> None:
    def watch(page: Page, url: str) -> None:
        page.open(url)
        page.wait_for(f"!{BY_ID.format('page')}.hidden")
        tab_to(page, "prompt")
        run(page, 4000)
        assert "128" in text_of(page, "alert")
        run(page, 6)
        assert text_of(page, "alert") == ""
        assert text_of(page, "plain").endswith("def f(")

    await on_page(FakeEngine(), watch)


async def test_a_tenants_key_does_not_open_it() -> None:
    def watch(page: Page, url: str) -> None:
        page.open(url)
        page.wait_for("document.activeElement.id === 'key'")
        page.write("team")
        page.press("Enter")
        page.wait_for(f"{BY_ID.format('alert')}.textContent.includes('for the operator')")
        assert page.evaluate(f"{BY_ID.format('page')}.hidden")

    tenant = {"name": "team", "key_sha256": sha256(b"team").hexdigest()}
    await on_page(FakeEngine(), watch, api_keys=("operator",), tenants=(tenant,))


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_a_phone_and_is_readable(scheme: str) -> None:
    await on_page(FakeEngine(), partial(look, scheme=scheme))


def look(page: Page, url: str, *, scheme: str) -> None:
    page.show(360, 740, scheme=scheme)
    page.open(url)
    page.wait_for(f"!{BY_ID.format('page')}.hidden")
    tab_to(page, "prompt")
    run(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.evaluate(CONTRAST) >= 4.5
    is_dark = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert (is_dark == "rgb(14, 17, 22)") == (scheme == "dark")
    moves = "getComputedStyle(document.querySelector('.token')).transitionProperty"
    assert page.evaluate(moves) == "none", "who asks for little motion gets none"
    page.call("Accessibility.enable")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    named = {
        node["name"]["value"]
        for node in nodes
        if not node["ignored"] and node["role"]["value"] in ROLES
    }
    assert len(named) > 15
    assert "" not in named
