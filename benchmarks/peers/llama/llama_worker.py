"""llama.cpp behind lines of JSON; run by a Python that has llama_cpp, and not draftline.

    python llama_worker.py MODEL.gguf THREADS

Each line of stdin asks for one thing; each line of stdout answers it, the first that it is ready:

    {"do": "pass", "context": 64, "rows": 8}                        -> {"seconds": 0.004}
    {"do": "decode", "prompt": [..], "tokens": 128, "lookup": 5}    -> {"seconds": 1, "ids": [..]}

`lookup` is the number of tokens that llama-cpp-python's own prompt lookup drafts; 0 for none.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
import time
from functools import cache
from itertools import islice
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

CONTEXT_LEN = 1024


@cache
def model(path: str, threads: int, lookup: int, all_logits: bool) -> Llama:
    """The model, with a context of its own."""
    draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
    return Llama(
        path, n_ctx=CONTEXT_LEN, n_threads=threads, n_threads_batch=threads, verbose=False,
        logits_all=all_logits or lookup > 0, draft_model=draft,
    )  # fmt: skip


def run_pass(path: str, threads: int, context: int, rows: int) -> dict[str, Any]:
    """Time one pass of `rows` tokens, with logits for all, behind `context` cached ones."""
    llama = model(path, threads, 0, all_logits=True)
    if llama.n_tokens < context:
        llama.reset()
        llama.eval([token % 100 for token in range(context)])
    llama.n_tokens = context
    start = time.perf_counter()
    llama.eval([token + 2 for token in range(rows)])
    return {"seconds": time.perf_counter() - start}


def decode(path: str, threads: int, prompt: list[int], tokens: int, lookup: int) -> dict[str, Any]:
    """Time a greedy answer, its prompt included."""
    llama = model(path, threads, lookup, all_logits=False)
    llama.reset()
    start = time.perf_counter()
    ids = list(islice(llama.generate(prompt, temp=0.0, repeat_penalty=1.0), tokens))
    return {"seconds": time.perf_counter() - start, "ids": [int(token) for token in ids]}


def main() -> None:
    """Answer until stdin ends."""
    path, threads = sys.argv[1], int(sys.argv[2])
    actions = {"pass": run_pass, "decode": decode}
    print("{}", flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(actions[asked.pop("do")](path, threads, **asked)), flush=True)


if __name__ == "__main__":
    main()
