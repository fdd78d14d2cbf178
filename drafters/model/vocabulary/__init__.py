"""Drafters whose tokenizer is not the target's: how their tokens become the target's.

Start with `strategy.py`.
"""
