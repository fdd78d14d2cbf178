"""Trains and exports the bundled language models; `deploy/cli/demo/train_models.py` runs it.

An exported model holds bfloat16 safetensors, config and tokenizer in Hugging Face format.
"""

from __future__ import annotations

import csv
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from ..core.progress import Progress, unseen
from . import corpus
from .language_model import Phase, TokenStreams, TrainingPlan, evaluate, train
from .tokenizers import byte_tokenizer, train_tokenizer, train_unigram_tokenizer

CONTEXT_LEN = 1024


class TokenizerKind(Enum):
    """The tokenizer of a bundled model: the target's, or another kind."""

    BYTE_LEVEL_BPE = "bpe"
    UNIGRAM = "unigram"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoModel:
    """Shape and training length of one bundled model.

    kind      transformers' `model_type`
    settings  of its config, beside those that all kinds have
    """

    name: str
    kind: str = "llama"
    settings: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: TokenizerKind = TokenizerKind.BYTE_LEVEL_BPE
    context_len: int = CONTEXT_LEN
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    plan: TrainingPlan

    def config(self, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
        """The transformers config; embedding and head share one matrix."""
        return AutoConfig.for_model(
            self.kind,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.ffn_size,
            num_hidden_layers=self.num_layers,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.context_len,
            tie_word_embeddings=True,
            bos_token_id=end_token_ids(tokenizer)[1],
            eos_token_id=end_token_ids(tokenizer)[0],
            **self.settings,
        )


TARGET = DemoModel(
    name="demo", vocab_size=4096, hidden_size=256, num_layers=6, num_heads=4, num_kv_heads=2,
    ffn_size=688, plan=TrainingPlan(num_steps=6000),
)  # fmt: skip
DRAFTER = DemoModel(
    name="demo-drafter", vocab_size=4096, hidden_size=96, num_layers=2, num_heads=3,
    num_kv_heads=1, ffn_size=256, plan=TrainingPlan(num_steps=2000),
)  # fmt: skip
OTHER_VOCAB_DRAFTER = DemoModel(
    name="demo-drafter-other-vocab", tokenizer=TokenizerKind.UNIGRAM, vocab_size=2048,
    hidden_size=96, num_layers=2, num_heads=3, num_kv_heads=1, ffn_size=256,
    plan=TrainingPlan(num_steps=2000),
)  # fmt: skip
# The other tokenizers have two to four bytes a token, so its windows are longer.
BYTES_DRAFTER = DemoModel(
    name="demo-drafter-bytes", tokenizer=TokenizerKind.BYTES, context_len=2048, vocab_size=258,
    hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, ffn_size=344,
    plan=TrainingPlan(
        num_steps=2400, phases=(Phase(0.0, 256, 8), Phase(0.7, 1024, 2), Phase(0.9, 2048, 1))
    ),
)  # fmt: skip
# Three layers with a gated delta rule and one with attention.
HYBRID = DemoModel(
    name="demo-hybrid", kind="qwen3_5_text", vocab_size=4096, hidden_size=192, num_layers=4,
    num_heads=4, num_kv_heads=2, ffn_size=512,
    settings={
        "head_dim": 64, "linear_num_key_heads": 2, "linear_key_head_dim": 64,
        "linear_num_value_heads": 4, "linear_value_head_dim": 64,
    },
    plan=TrainingPlan(
        num_steps=3600, phases=(Phase(0.0, 128, 8), Phase(0.6, 256, 8), Phase(0.9, 1024, 2)),
        checkpoint_every=50, compile=False,
    ),
)  # fmt: skip
MODELS = {
    model.name: model for model in (TARGET, DRAFTER, OTHER_VOCAB_DRAFTER, BYTES_DRAFTER, HYBRID)
}


def build(
    model: DemoModel, run_dir: Path, export_dir: Path, threads: int, progress: Progress = unseen
) -> float:
    """Train (or resume) and export one model; returns its held-out perplexity."""
    torch.set_num_threads(threads)
    files = corpus.training_files()
    more_files = corpus.training_files(more=True)
    tokenizer = _tokenizer(model, files, more_files, run_dir)
    texts = TokenStreams(
        first=_stream(tokenizer, files),
        more=_stream(tokenizer, more_files),
        held_out=_stream(tokenizer, corpus.held_out_files()),
    )
    trained = train(model.config(tokenizer), texts, model.plan, run_dir, progress)
    loss = export(trained, tokenizer, texts.held_out, export_dir, model.context_len)
    bits = loss / math.log(2) * len(texts.held_out)
    held_out_bytes = sum(len(file.text.encode()) for file in corpus.held_out_files())
    draw_loss_curve(run_dir / "loss.csv", export_dir / "loss.png", model.name)
    report = {
        "held_out_perplexity": round(math.exp(loss), 3),
        "held_out_bits_per_byte": round(bits / held_out_bytes, 3),
        "held_out_tokens": len(texts.held_out),
        "parameters": trained.num_parameters(),
        "corpus_files": len(files),
        "corpus_tokens": len(texts.first),
        "larger_corpus_files": len(more_files),
        "larger_corpus_tokens": len(texts.more),
        "plan": asdict(model.plan),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    (export_dir / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    return math.exp(loss)


def export(
    trained: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    held_out: np.ndarray,
    folder: Path,
    window: int = CONTEXT_LEN,
) -> float:
    """Write the model as bfloat16; returns the held-out loss of the exported model, nats a
    token."""
    trained.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    written = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return evaluate(written, held_out, window)


def _tokenizer(
    model: DemoModel,
    files: list[corpus.SourceFile],
    more_files: list[corpus.SourceFile],
    run_dir: Path,
) -> PreTrainedTokenizerFast:
    is_bpe = model.tokenizer is TokenizerKind.BYTE_LEVEL_BPE
    kind = "" if is_bpe else f"{model.tokenizer.value}-"
    folder = run_dir.with_name(f"tokenizer-{kind}{model.vocab_size}")
    if not folder.exists():
        _new_tokenizer(model, files, more_files).save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


def _new_tokenizer(
    model: DemoModel, files: list[corpus.SourceFile], more_files: list[corpus.SourceFile]
) -> PreTrainedTokenizerFast:
    if model.tokenizer is TokenizerKind.BYTES:
        return byte_tokenizer(model.context_len)
    if model.tokenizer is TokenizerKind.BYTE_LEVEL_BPE:
        return train_tokenizer((file.text for file in files), model.vocab_size, model.context_len)
    # Files that the target's tokenizer was not trained on.
    known = {file.name for file in files}
    texts = (file.text for file in more_files if file.name not in known)
    return train_unigram_tokenizer(texts, model.vocab_size, model.context_len)


def end_token_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int]:
    """Ids of the tokens that end and begin a text."""
    end, begin = tokenizer.eos_token_id, tokenizer.bos_token_id
    assert isinstance(end, int), "our tokenizers have one token that ends a text"
    assert isinstance(begin, int), "and one that begins it"
    return end, begin


def _stream(
    tokenizer: PreTrainedTokenizerFast, files: list[corpus.SourceFile]
) -> npt.NDArray[np.int64]:
    """All files in one stream, separated by the tokens (or the token) that end and begin a text."""
    between = list(dict.fromkeys(end_token_ids(tokenizer)))
    ids: list[int] = []
    for file in files:
        ids += between
        ids += tokenizer.encode(file.text, add_special_tokens=False, verbose=False)
    return np.array(ids, dtype=np.int64)


def draw_loss_curve(loss_csv: Path, png: Path, title: str) -> None:
    """Training and held-out loss over tokens seen, from the rows that `train` appends."""
    # Matplotlib is a development dependency: training needs it, serving does not.
    from matplotlib.figure import Figure

    with loss_csv.open(newline="") as file:
        rows = [
            (float(tokens), float(loss), float(held)) for _, tokens, loss, held in csv.reader(file)
        ]
    tokens, loss, held = zip(*rows, strict=True)
    millions = [count / 1e6 for count in tokens]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(millions, loss, label="training batch", linewidth=1)
    axes.plot(millions, held, label="held-out files", linewidth=2)
    axes.set(title=title, xlabel="tokens seen (millions)", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png, dpi=120)
