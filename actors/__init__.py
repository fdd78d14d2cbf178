"""Ray actors and gRPC servers: thin shells over plain classes.

Start with `stage_actor.py`; `server/` has the code that the servers share.
"""
