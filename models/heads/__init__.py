"""Trained drafters that read the target's features: networks and checkpoints.

Start with `feature_head.py`; `checkpoint_kind.py` detects the kind of a checkpoint.
"""
