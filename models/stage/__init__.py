"""A stage: some layers, their KV cache, and steps through them.

Start with `stage.py`.
"""
