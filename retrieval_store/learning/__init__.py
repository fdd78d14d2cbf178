"""What is learned of whom, and how it is forgotten.

Start with `learning.py`.
"""
