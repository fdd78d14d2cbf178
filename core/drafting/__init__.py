"""The drafting half of a step.

Start with `asking.py`, which speaks with the drafters; `tree_choice.py` makes trees of what they
say, `tree_fit.py` finds KV slots for these.
"""
