"""How the parts are spread: configuration, pipelines, the drafter hub and its wire.

Start with `engine/assembly.py`, which puts an engine together.
"""
