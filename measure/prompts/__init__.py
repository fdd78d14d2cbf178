"""Prompts of a measurement: conversations from files in the forms that datasets are published in.

Start with `files.py`.
"""
