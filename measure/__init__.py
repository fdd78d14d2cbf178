"""What `draftline bench` and `draftline lossless` measure, over any source of token streams.

Start with `runs/matched.py`.
"""
