"""The drafter that runs a small model: chains, trees, when to stop.

Start with `drafter.py`.
"""
