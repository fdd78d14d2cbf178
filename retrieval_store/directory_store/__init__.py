"""A store in a folder.

Start with `store.py`.
"""
