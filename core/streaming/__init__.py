"""Trees that go through the pipeline in several steps.

Read `chunks.py` first; the tree itself is `core/tree/streamed_tree.py`. Which requests are streamed
and what goes out is decided in `core/pipelined_drafting.py`.
"""
