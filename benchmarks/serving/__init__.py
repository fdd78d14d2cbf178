"""Whole servers under load, under faults and under hostile requests.

Start with `faults.py`.
"""
