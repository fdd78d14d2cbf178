"""What a model folder holds, and which layers each stage loads of it.

Start with `checkpoint.py`.
"""
