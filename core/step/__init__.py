"""A step as flat arrays, and what its results mean for each request.

Start with `builder.py`.
"""
