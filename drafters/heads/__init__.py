"""Drafters that go on from the target's hidden states: feature heads, SpecFormer, DFlash, DSpark.

Start with `drafter.py`.
"""
