"""The engine in a process of its own: what it and the processes of the HTTP API tell one another.

Start with `server.py` (the engine's side) and `client.py` (the API's side).
"""
