"""The composition root: command line, Ray Serve app, OpenAI API, bundled models.

Start with `engine/engine.py`, the engine as Python sees it; commands are in `cli/`.
"""
