"""What is the same for every route: connections, callers and their limits, drain, metrics.

Start with `middleware.py`.
"""
