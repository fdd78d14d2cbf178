"""The drafting half of a step: `asking.py` speaks with the drafters, `tree_choice.py` makes trees
of what they say, `tree_fit.py` finds KV slots for them.
"""
