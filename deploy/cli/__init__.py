"""The command line, a folder for every command with parts of its own.

Start with `main.py`.
"""
