"""The measurements of `draftline bench` and `draftline lossless`, over any source of token streams.

Start with `runs/matched.py`.
"""
