"""What a soak's server draws on, and the benchmark starts, loses, fills and slows.

Start with `redis_server.py`; the Ray nodes are in `../../on_ray/nodes.py`.
"""
