"""The layers of a stage: loading a slice of a model, faster modules, CPU kernels.

Start with `model_slice.py`.
"""
