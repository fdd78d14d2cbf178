"""Attention of a stage's layers over its paged KV.

Start with `backend.py`.
"""
