"""What Ray Serve asks: which replica takes a request, and how many replicas there should be.

Start with `prefix_routing.py`.
"""
