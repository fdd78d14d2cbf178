"""Drafters that go on from the target's hidden states: feature heads, SpecFormer, Medusa.

Start with `drafter.py`.
"""
