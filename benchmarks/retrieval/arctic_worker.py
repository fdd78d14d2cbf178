"""The suffix tree of arctic-inference; run by a Python that has it and numpy, and not draftline.

    python arctic_worker.py TOKENS.npy ENDS.npy CONTEXTS.npy MAX_NODES

Documents are int32 tokens up to each of `ENDS`. Builds one tree, looks every context up, and writes
one line of JSON: seconds to build, bytes by the tree's own estimate, and microseconds of each
lookup in three runs after one to warm up.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
import time

import numpy as np
from arctic_inference.suffix_decoding._C import SuffixTree

DEPTH = 32


def main(tokens: str, ends: str, contexts: str, max_nodes: str) -> None:
    """Build and measure."""
    documents = np.split(np.load(tokens), np.load(ends)[:-1])
    asked = list(np.load(contexts))
    tree = SuffixTree(DEPTH)
    start = time.perf_counter()
    for index, document in enumerate(documents):
        tree.extend_ndarray(index, document)
    built = time.perf_counter()
    _, *runs = [[_micros(tree, context, int(max_nodes)) for context in asked] for _ in range(4)]
    answer = {"seconds": built - start, "bytes": tree.estimate_memory(), "micros": runs}
    print(json.dumps(answer))


def _micros(tree: SuffixTree, context: np.ndarray, max_nodes: int) -> float:
    begin = time.perf_counter()
    # As many nodes as the lookups of draftline, whatever their probability, as a tree.
    tree.speculate_ndarray(context, max_nodes, float(max_nodes), 0.0, 0.0, True)
    return 1e6 * (time.perf_counter() - begin)


if __name__ == "__main__":
    main(*sys.argv[1:])
