"""The engine with its thread, built from settings, and what watches over it.

Start with `assembly.py`.
"""
