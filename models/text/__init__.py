"""Text to tokens and back, and forms that a text must have.

Start with `tokenizer.py`.
"""
