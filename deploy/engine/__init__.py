"""The engine as Python sees it: `Engine` for scripts, `AsyncEngine` for servers.

Start with `async_engine.py`.
"""
