"""llama.cpp behind lines of JSON; run by a Python that has llama_cpp and gguf, and not draftline.

    python llama_worker.py WEIGHTS.npz CONFIG.json MODEL.gguf

Writes a GGUF file of a Llama checkpoint's arrays (names of Hugging Face, float32) and serves it on
one thread. Each line of stdin asks for one thing; each line of stdout answers it:

    {"do": "pass", "context": 64, "rows": 8}                        -> {"seconds": 0.004}
    {"do": "decode", "prompt": [..], "tokens": 128, "lookup": 5}    -> {"seconds": 1, "ids": [..]}

`lookup` is the number of tokens that llama-cpp-python's own prompt lookup drafts; 0 for none.
The vocabulary is left out: everything is token ids.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
import time
from functools import cache
from itertools import islice
from typing import Any

import gguf
import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

CONTEXT_LEN = 1024
MODEL_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(weights: str, config: dict[str, Any], path: str) -> None:
    """Write the model; queries and keys are reordered, since llama.cpp rotates neighbours."""
    writer = gguf.GGUFWriter(path, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(CONTEXT_LEN)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_tokenizer_model("no_vocab")
    for name, array in np.load(weights).items():
        count = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2])
        writer.add_tensor(gguf_name(name), array if count is None else reordered(array, count))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """A tensor's name in llama.cpp."""
    if name in MODEL_NAMES:
        return MODEL_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[rest.removesuffix('.weight')]}.weight"


def reordered(weight: np.ndarray, heads: int) -> np.ndarray:
    """Halves of each head interleaved."""
    outputs, inputs = weight.shape
    halves = weight.reshape(heads, 2, outputs // heads // 2, inputs)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(outputs, inputs)


@cache
def model(path: str, lookup: int, all_logits: bool) -> Llama:
    """The model, with a context of its own."""
    draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
    return Llama(
        path, n_ctx=CONTEXT_LEN, n_threads=1, n_threads_batch=1, verbose=False,
        logits_all=all_logits or lookup > 0, draft_model=draft,
    )  # fmt: skip


def run_pass(path: str, context: int, rows: int) -> dict[str, Any]:
    """Time one pass of `rows` tokens, with logits for all, behind `context` cached ones."""
    llama = model(path, 0, all_logits=True)
    if llama.n_tokens < context:
        llama.reset()
        llama.eval([token % 100 for token in range(context)])
    llama.n_tokens = context
    start = time.perf_counter()
    llama.eval([token + 2 for token in range(rows)])
    return {"seconds": time.perf_counter() - start}


def decode(path: str, prompt: list[int], tokens: int, lookup: int) -> dict[str, Any]:
    """Time a greedy answer, its prompt included."""
    llama = model(path, lookup, all_logits=False)
    llama.reset()
    start = time.perf_counter()
    ids = list(islice(llama.generate(prompt, temp=0.0, repeat_penalty=1.0), tokens))
    return {"seconds": time.perf_counter() - start, "ids": [int(token) for token in ids]}


def main() -> None:
    """Write the model, then answer until stdin ends."""
    weights, config, path = sys.argv[1:]
    with open(config) as file:  # noqa: PTH123
        write_gguf(weights, json.load(file), path)
    actions = {"pass": run_pass, "decode": decode}
    print("{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(actions[asked.pop("do")](path, **asked)), flush=True)


if __name__ == "__main__":
    main()
