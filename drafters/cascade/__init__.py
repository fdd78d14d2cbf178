"""A drafter made of drafters: cheaper ones draft for a better one, and go on behind it.

Start with `drafter.py`; `helper.py` is the vertical half.
"""
