"""Lookups: the longest match, and the tree of what follows it.

Start with `lookup.py`.
"""
