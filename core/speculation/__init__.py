"""Who drafts for whom in a step, and which draft tokens are verified.

Start with `policy.py`.
"""
