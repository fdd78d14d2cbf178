"""`draftline tenant`: keys and limits of tenants that servers look up while they run.

Start with `command.py`.
"""
