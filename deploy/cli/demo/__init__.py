"""`draftline demo`.

Start with `command.py`.
"""
