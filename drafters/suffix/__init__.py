"""Suffix decoding, over an automaton of each request's text.

Start with `drafter.py`.
"""
