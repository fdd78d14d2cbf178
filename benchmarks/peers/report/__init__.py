"""What a comparison leaves: runs in a file, ratios, tables, a picture.

Start with `runs.py`.
"""
