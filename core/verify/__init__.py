"""The walk down a verified tree, and what the acceptance rules of the literature decide about.

Start with `walk.py`.
"""
