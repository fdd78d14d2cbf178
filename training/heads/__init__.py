"""Training of the heads that read a target's features, and of small models that imitate a target,
on texts that the target generated.

Start with `trainer.py`; `objectives.py` has the training step of each kind of network.
"""
