"""How steps and hidden states travel between the coordinator and stages.

Start with `distributed.py`.
"""
