"""The layers of a stage: loaded, sliced, made fast, compiled.

Start with `model_slice.py`.
"""
