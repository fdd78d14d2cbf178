"""A store in Redis.

Start with `store.py`.
"""
