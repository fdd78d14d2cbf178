"""Answers in the formats of the API: whole bodies, and events of a stream.

Start with `events.py`.
"""
