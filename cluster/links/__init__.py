"""What lies between the drafter hub and its drafters: messages, connections, credentials.

Start with `link.py`.
"""
