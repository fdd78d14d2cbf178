"""A stage: some layers, their KV cache, and steps through them.

Start with `load_stage.py`, then `stage.py`. A stage computes by one of `cpu_path.py`, `gpu_path.py`
and `plain_path.py`.
"""
