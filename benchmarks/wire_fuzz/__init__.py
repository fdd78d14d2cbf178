"""Mutated messages of every wire format, read as whoever receives them reads them.

Start with `__main__.py`.
"""
