"""Products with weights of 8 bits.

Start with `product.py`.
"""
