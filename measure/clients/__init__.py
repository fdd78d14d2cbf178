"""Requests, endpoints and load.

Start with `endpoint.py`.
"""
