"""The command line, a folder for every command with parts of its own.

Start with `main.py`; `flags.py` makes flags of the fields of settings.
"""
