"""Training of the heads that read a target's features, from texts that it said.

Start with `trainer.py`; what a step does is told by `objectives.py`.
"""
