"""A request: its parameters, what it may choose, where it ends, what it answers.

Start with `request.py`.
"""
