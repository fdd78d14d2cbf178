"""Pipelined trees over simulated stages and recorded answers. Read `run.py` first.

python -m draftline.benchmarks.step.streaming
"""
