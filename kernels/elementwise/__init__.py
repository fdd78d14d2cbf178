"""Norms, rotations and gates.

Start with `ops.py`; `reference.py` defines what they compute.
"""
