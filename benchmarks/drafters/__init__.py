"""Small models as drafters, by themselves.

Start with `weights.py`.
"""
