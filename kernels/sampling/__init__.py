"""One token for every row of logits: edits, filters, noise.

Start with `sampler.py`; `reference.py` defines what the kernels compute, and is what CPUs run.
"""
