"""Token trees: proposals merged by prefix, ancestors, and what a node is worth.

Start with `tree.py`.
"""
