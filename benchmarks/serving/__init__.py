"""Whole servers under load and under faults.

Start with `faults.py`.
"""
