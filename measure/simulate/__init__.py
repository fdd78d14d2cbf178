"""Simulation: the engine over a small model, with the timing of a larger one on other machines.

Start with `cost_profile.py`.
"""
