"""The HTTP API: what a request asks, how it is answered, and what bounds it.

Start with `app.py`.
"""
