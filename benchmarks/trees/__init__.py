"""Trees of a small model: rules that decide about them, and their sizes and shapes.

Start with `sizes.py`.
"""
