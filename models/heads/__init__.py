"""Trained drafters that read the target's features: their networks, and what their checkpoints are.

Start with `feature_head.py`; `formats/checkpoint_kind.py` tells kinds of checkpoints apart.
"""
