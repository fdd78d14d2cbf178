"""`draftline train`: texts of a target, and drafters trained on them.

Start with `command.py`.
"""
