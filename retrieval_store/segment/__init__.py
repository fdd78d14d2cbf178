"""A segment: token text with its suffix array, built once and mapped.

Start with `segment.py`.
"""
