"""What a step costs: model, drafters, scheduling, sampling.

Start with `host_work.py`.
"""
