"""The engine over a small model, as fast as a larger one would be on other machines.

Start with `cost_profile.py`.
"""
