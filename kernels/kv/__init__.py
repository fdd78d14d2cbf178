"""Writes, moves and copies within a paged KV cache.

Start with `ops.py`.
"""
