"""Retrieval stores: corpora, trie segments, learning, lookups.

Start with `store.py`, the interface of both kinds of store.
"""
