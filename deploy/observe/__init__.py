"""What operators see of a server besides its metrics: lines of the log and spans of requests.

Start with `spans.py`.
"""
