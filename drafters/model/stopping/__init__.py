"""How long drafts become: rules that end them, what they learn, and what drafting takes.

Start with `rules.py`.
"""
