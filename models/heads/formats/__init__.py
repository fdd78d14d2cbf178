"""Heads' checkpoints as their projects publish them: kinds, tensors, sizes.

Start with `checkpoint_kind.py`.
"""
