"""Runs side by side: matched requests, equal answers, distributions.

Start with `matched.py`.
"""
