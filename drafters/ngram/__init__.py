"""Drafters that copy n-grams: prompt lookup, ANPD, Lookahead, SPECTRA, token recycling.

Start with `prompt_lookup.py`.
"""
