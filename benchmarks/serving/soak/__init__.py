"""Mixed requests of several tenants on Ray while its processes are killed and paused.

Start with `run.py`; `python -m draftline.benchmarks.serving.soak` runs it.
"""
