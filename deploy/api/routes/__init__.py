"""The routes, and reading their bodies.

Start with `generation.py`.
"""
