"""The drafter hub: asks every drafter at every step, tells it of commits, and collects proposals.

Start with `hub.py`.
"""
