"""Pipelined trees: one request's tree goes through the stages in several chunks.

Read `chunks.py` first; the tree itself is `core/tree/pipelined_tree.py`. Which requests have one,
and which nodes go out when, is decided in `core/pipelined_drafting.py`.
"""
