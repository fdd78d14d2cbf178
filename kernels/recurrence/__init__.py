"""Rows of a step through layers that keep a state: gated delta rules, and Mamba-2's.

Start with `walk.py`, which CPU stages use, by `kernels/cpu/source/recurrence.cpp` where that can be
built; `tree_form.py` is the same as products of matrices, and `tree_kernels.py` those on GPUs.
"""
