"""Batch-invariant products: a row's result does not depend on the other rows.

Start with `product.py`.
"""
