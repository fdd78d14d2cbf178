"""`draftline train`: texts that a target says, and heads that are trained on them.

Start with `command.py`.
"""
