"""One HTTP request as work for the engine: prompts, parameters, deadline, pace.

Start with `job.py`.
"""
