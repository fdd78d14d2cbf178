"""Common parts of draftline's gRPC servers: listening, tokens, health checks, child processes.

Start with `listener.py`.
"""
