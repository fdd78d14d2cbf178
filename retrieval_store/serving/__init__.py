"""Lookups for many callers: queues, refreshes, learning in the background.

Start with `service.py`.
"""
