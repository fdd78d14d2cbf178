"""The algorithms, pure: standard library, numpy and numba.

Start with `engine.py`, whose `step` calls all others.
"""
