"""What lies between the hub and drafters of other processes: messages, connections, credentials.

Start with `link.py`.
"""
