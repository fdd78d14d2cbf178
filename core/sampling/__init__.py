"""From logits to one token, with noise that depends on seed, position and token alone.

Start with `choose.py`.
"""
