"""Who runs in the next step, in which KV blocks, with how many nodes.

Start with `scheduler.py`.
"""
