"""What is the same for every route: connections, callers, drain, metrics.

Start with `middleware.py`.
"""
