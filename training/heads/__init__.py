"""Training of the heads that read a target's features, on texts that the target generated.

Start with `trainer.py`; `objectives.py` has the training step of each kind of head.
"""
