"""`draftline train`: texts of a target, and heads trained on them.

Start with `command.py`.
"""
