"""Ray actors and gRPC servers: thin shells over plain classes.

Start with `stage_actor.py`; what servers share is in `server/`.
"""
