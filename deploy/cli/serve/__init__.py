"""`draftline serve`: a server in this process, or on Ray Serve.

Start with `command.py`.
"""
