"""Products with weights of 8 bits.

Start with `int8_kernels.py`.
"""
