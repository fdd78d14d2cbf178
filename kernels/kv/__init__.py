"""Writes, moves and copies within a paged KV cache.

Start with `kv_cache_kernels.py`; `reference.py` defines what they compute.
"""
