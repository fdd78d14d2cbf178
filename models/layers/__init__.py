"""The layers of a stage: loading a slice of a model, faster modules, compilation.

Start with `model_slice.py`.
"""
