"""The target on torch: stages of Hugging Face models over a paged KV cache, weights, sampling.

Start with `stage/stage.py`.
"""
