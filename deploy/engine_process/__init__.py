"""The engine in a process of its own, and its connections to the processes of the HTTP API.

Start with `server.py` (the engine's side) and `client.py` (the API's side).
"""
