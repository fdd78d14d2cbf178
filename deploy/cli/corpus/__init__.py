"""`draftline corpus`: build, refine and look into retrieval stores.

Start with `command.py`.
"""
