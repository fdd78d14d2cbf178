"""Products with quantised weights, of 8 and 4 bits.

Start with `kept_weight.py`.
"""
