"""One token for every row of logits: edits, filters, noise.

Start with `choose.py`; `reference.py` defines what it computes.
"""
