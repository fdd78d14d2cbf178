"""`draftline trace`: what a trace file says, as a table and a picture.

Start with `command.py`.
"""
