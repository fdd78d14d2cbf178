"""Results as tables, files and pictures.

Start with `summary.py`.
"""
