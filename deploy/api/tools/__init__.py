"""Tools and reasoning: templates and forms for requests, parsers for what a model writes.

Start with `reading.py`.
"""
