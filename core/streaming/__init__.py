"""Trees that go through the pipeline in several steps.

Read `slices.py` first; the tree itself is `core/tree/streamed_tree.py`, who streams and what goes
out `core/schedule/streaming.py`.
"""
