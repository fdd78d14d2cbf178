"""The retrieval store: build, lookups, learning, refinement.

Start with `store.py`.
"""
