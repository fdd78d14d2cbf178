"""Clocks, ceilings and made-up stages for the GPU benchmark.

Start with `clock.py`.
"""
