"""How heads of each kind read features, keep what they know of a text, and grow trees.

Start with `head_network.py`.
"""
