"""The walk down a verified tree, and the acceptance rules of the literature in numpy.

Start with `walk.py`.
"""
