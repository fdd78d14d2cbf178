"""Who has which part of the engine's time: prompts beside answers, and tenants.

Start with `fair_share.py`.
"""
