"""The composition root: command line, Ray Serve app, OpenAI API, bundled models.

Start with `engine/async_engine.py`, the engine as servers see it; commands are in `cli/`.
"""
