"""Prompts of a measurement: conversations from files in the formats of published datasets.

Start with `files.py`.
"""
