"""A server on Ray that faults are made at, and its processes.

Start with `server.py`.
"""
