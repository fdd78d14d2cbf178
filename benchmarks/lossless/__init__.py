"""Speculative text against plain text, over models, drafters and parameters.

Start with `matrix.py`.
"""
