"""Rows of a step through layers that keep a state: gated delta rules, and Mamba-2's.

Start with `walk.py`, which CPU stages use; `tree_form.py` is the same as products of matrices.
"""
