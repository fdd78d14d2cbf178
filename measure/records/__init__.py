"""What a run leaves: requests, counts, the machine.

Start with `record.py`.
"""
