"""Learning from ended requests: policy, queue, log, and forgetting.

Start with `learning.py`.
"""
