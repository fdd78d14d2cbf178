"""What it costs to hand work to drafters and stages.

Start with `stage_transport.py`.
"""
