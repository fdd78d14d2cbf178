"""Attention over paged KV with the masks of token trees.

Start with `paged_attention.py`; `reference.py` defines what it computes.
"""
