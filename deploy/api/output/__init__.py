"""Answers as clients read them: whole bodies, and events of a stream.

Start with `events.py`.
"""
