"""Records of a run: requests, counts, the machine.

Start with `record.py`.
"""
