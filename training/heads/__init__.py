"""Training of feature heads: EAGLE, HASS and GRIFFIN, by one loop of several passes.

Start with `passes.py`.
"""
