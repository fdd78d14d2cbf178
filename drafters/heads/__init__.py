"""Drafters that go on from the target's hidden states: feature heads, and SpecFormer.

Start with `drafter.py`.
"""
