"""The layers of a stage: loading a slice of a model, faster modules, own operators.

Start with `model_slice.py`.
"""
