"""Norms, rotations and gates.

Start with `ops.py`; `reference.py` says what they compute.
"""
