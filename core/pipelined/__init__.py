"""Pipelined trees: one request's tree goes through the stages in several chunks.

Read `drafting.py` first: it decides which requests have one, and which nodes go out when.
"""
