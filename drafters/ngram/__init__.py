"""Drafters that copy n-grams: prompt lookup, ANPD, Lookahead, token recycling.

Start with `prompt_lookup.py`.
"""
