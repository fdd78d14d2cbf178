"""Tokenizers, chat templates and grammars.

Start with `tokenizer.py`.
"""
