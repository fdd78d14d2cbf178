"""Tenants that change while servers run: stores of them, changes to them, and their live view.

Start with `store.py`; `changes.py` is what `draftline tenant` does, `watch.py` what servers ask.
"""
