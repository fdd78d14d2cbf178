"""Pipelines of stages: in this process, or over Ray actors that are kept and replaced.

Start with `ray_pipeline.py`.
"""
