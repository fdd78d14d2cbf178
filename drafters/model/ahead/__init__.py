"""What a model drafts while the target computes: drafts behind the likeliest ends of a step.

Start with `drafts.py`.
"""
