"""`draftline bench` and `draftline lossless`.

Start with `command.py`.
"""
