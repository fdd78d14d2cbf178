"""Causal language models of any kind, run by transformers' own modules: drafters only.

Start with `hosted_stage.py`.
"""
