"""SPECTRA-CORE: two dictionaries of n-grams, and a pool of candidates that fills them.

Start with `drafter.py`.
"""
