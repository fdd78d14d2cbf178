"""Ray actors and gRPC servers: thin shells over plain classes.

Start with `kept_actors.py`; `listener.py` has what the servers share.
"""
