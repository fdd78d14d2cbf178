"""A drafter's view of retrieval stores: in this process, or behind replicated servers.

Start with `source.py`.
"""
