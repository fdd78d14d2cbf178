"""Drafters measured on recorded answers, without the model.

Start with `recording.py`.
"""
