"""Drafters that go on from the target's hidden states: trained heads of all kinds.

Start with `drafter.py`.
"""
