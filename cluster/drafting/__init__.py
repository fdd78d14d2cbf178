"""The drafter hub: tells drafters of commits, asks them, and collects their proposals.

Start with `hub.py`.
"""
