"""Bodies of requests and what each field may hold.

Start with `protocol.py`.
"""
