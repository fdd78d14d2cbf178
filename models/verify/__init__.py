"""The acceptance rules in torch, beside the logits.

Start with `apply.py`; `core/verify/` has each rule in numpy.
"""
