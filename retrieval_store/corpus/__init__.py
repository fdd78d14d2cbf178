"""From documents to a store: reading, scoring, refining by perplexity, building.

Start with `build.py`.
"""
