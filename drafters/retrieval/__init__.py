"""The drafter that looks continuations up in a retrieval store.

Start with `drafter.py`.
"""
