"""`draftline corpus build` over a real model."""

from __future__ import annotations

import json
import math
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from draftline.deploy.cli import main as cli
from draftline.deploy.cli.corpus.build import open_corpus_model
from draftline.deploy.cli.corpus.command import Selection
from draftline.retrieval_store.corpus.documents import Document, Span
from draftline.retrieval_store.corpus.selection import SELECTIONS
from draftline.retrieval_store.directory_store.store import DirectoryStore
from support.servers.served_model import COMMAND
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

runner = CliRunner()
NUM_DOCUMENTS, KEEP = 400, 100


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    rng = random.Random(0)
    texts = ("".join(rng.choices("abcdefgh \n", k=rng.randrange(150, 240))) for _ in range(400))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def build_command(corpus: Path, store: Path, checkpoint: Path) -> list[str]:
    options = ["--store", str(store), "--model", str(checkpoint), "--keep", str(KEEP)]
    return ["corpus", "build", "--input", str(corpus), *options]


@pytest.mark.timeout(400)
def test_a_killed_build_goes_on_where_it_stopped(
    corpus: Path, tmp_path: Path, checkpoint: Path
) -> None:
    store, journal = tmp_path / "store", tmp_path / "store.scores"
    command = build_command(corpus, store, checkpoint)
    with subprocess.Popen(
        [*COMMAND, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and (not journal.exists() or journal.stat().st_size < 100):
            time.sleep(0.002)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    scored = journal.read_bytes()
    assert 1 < scored.count(b"\n") < 1 + NUM_DOCUMENTS
    assert not DirectoryStore(store).manifest().written

    resumed = runner.invoke(cli.app, command)
    assert f"kept {KEEP} of {NUM_DOCUMENTS} documents" in resumed.output
    lines = journal.read_bytes().splitlines()
    assert journal.read_bytes().startswith(scored[: scored.rfind(b"\n") + 1])
    assert len(lines) == len(set(lines)) == 1 + NUM_DOCUMENTS
    assert {len(line.split()) for line in lines[1:]} == {4}

    undisturbed = tmp_path / "undisturbed"
    assert runner.invoke(cli.app, build_command(corpus, undisturbed, checkpoint)).exit_code == 0
    segments = DirectoryStore(undisturbed).manifest().sizes
    assert DirectoryStore(store).manifest().sizes == segments


def test_what_was_dropped_is_told(corpus: Path, tmp_path: Path, checkpoint: Path) -> None:
    lines = corpus.read_text().splitlines()[:20]
    chat = [{"role": "user", "content": "q" * 40}, {"role": "assistant", "content": "a b c " * 12}]
    rows = [*lines, lines[0], '{"text": "short"}', "{", json.dumps({"messages": chat})]
    path = tmp_path / "b.jsonl"
    path.write_text("\n".join(rows))
    report = tmp_path / "out" / "report.json"
    result = runner.invoke(
        cli.app,
        ["corpus", "add", str(path), "--store", str(tmp_path / "store"), "--model", str(checkpoint),
         "--keep", "15", "--select", "lowest", "--report", str(report)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for reason in ("duplicate", "too short", "bad JSON line", "perplexity"):
        assert reason in result.output
    told = json.loads(report.read_text())
    counts = {reason: one["documents"] for reason, one in told["dropped"].items()}
    assert counts == {"duplicate": 1, "too short": 1, "bad JSON line": 1, "perplexity": 6}
    assert told["dropped"]["duplicate"]["examples"] == [f"{path}:21"]
    assert told["read"] == 24
    assert told["kept"] == 15


def test_a_build_that_cannot_choose_is_refused(tmp_path: Path) -> None:
    command = ["corpus", "build", "--store", str(tmp_path / "store")]
    result = runner.invoke(cli.app, command)
    assert "input: name files or folders" in str(result.exception)
    for name in ("coverage", "token_coverage"):
        result = runner.invoke(cli.app, [*command, "a.txt", "--select", name])
        assert f"select: {name} needs keep" in str(result.exception)
    assert runner.invoke(cli.app, [*command, "a.txt", "--select", "most"]).exit_code == 2


def test_each_selection_has_its_flag(corpus: Path, tmp_path: Path, checkpoint: Path) -> None:
    """One journal serves all of them: what one has scored the others find."""
    assert get_args(Selection) == SELECTIONS
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(corpus.read_text().splitlines()[:40]))
    sizes = {}
    for select in (*SELECTIONS, None):
        command = build_command(path, tmp_path / str(select), checkpoint)
        command[command.index("--keep") + 1] = "10"
        flags = ["--journal", str(tmp_path / "scores")]
        flags += [] if select is None else ["--select", select]
        result = runner.invoke(cli.app, [*command, *flags])
        assert "kept 10 of 40 documents" in result.output
        assert (tmp_path / "scores").read_bytes().count(b"\n") == 41
        sizes[select] = DirectoryStore(tmp_path / str(select)).manifest().sizes
    assert sizes[None] == sizes["token_coverage"]
    assert len({str(sizes[select]) for select in SELECTIONS}) == 3


def test_answers_have_the_perplexity_that_transformers_gives_them(checkpoint: Path) -> None:
    model = open_corpus_model(str(checkpoint))
    text = "user: why?\nassistant: because so\n"
    start = text.index("because")
    document = model.tokenize(Document("c", text, (Span(start, start + len("because so")),)))
    assert document.is_scored is not None
    assert model.tokenizer.decode(document.ids[document.is_scored].tolist()) == "because so"
    [score] = model.scorer().scores([document], lambda _: None)

    peer = AutoModelForCausalLM.from_pretrained(checkpoint)
    ids = torch.from_numpy(document.ids.astype(np.int64))[None]
    with torch.inference_mode():
        log_probs = peer(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
    own = log_probs.gather(1, ids[0, 1:, None])[torch.from_numpy(document.is_scored[1:]), 0]
    assert score.perplexity == pytest.approx(math.exp(-own.mean().item()), rel=1e-4)


def test_a_document_has_no_bos_of_its_own() -> None:
    model = open_corpus_model("demo")
    bos = model.tokenizer.bos_token
    assert isinstance(bos, str)
    text = f"{bos}# user: why?"
    plain = model.tokenize(Document("a", text.removeprefix(bos)))
    spans = (Span(len(bos), len(text)),)
    for document in (Document("b", text), Document("c", text, spans)):
        assert model.tokenize(document).ids.tolist() == plain.ids.tolist()
    is_scored = model.tokenize(Document("c", text, spans)).is_scored
    assert is_scored is not None
    assert is_scored.all()
    assert len(is_scored) == len(plain.ids)
