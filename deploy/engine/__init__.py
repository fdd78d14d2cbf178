"""The engine as Python sees it: `Engine` for scripts, `AsyncEngine` for servers.

Start with `engine.py`.
"""
