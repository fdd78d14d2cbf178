"""What a step costs: model, drafters, scheduling, sampling.

Start with `decode.py`.
"""
