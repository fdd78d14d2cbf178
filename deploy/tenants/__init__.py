"""Tenants that change while servers run: stores of them, changes to them, and their live view.

Start with `store.py`; `watch.py` is what servers ask.
"""
