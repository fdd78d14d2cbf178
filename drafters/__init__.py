"""Drafters: numpy algorithms that propose and observe; torch only where one runs a model.

Every sub-folder is a family; the interface is in `core/interfaces.py`.
"""
