"""The target on torch: stages of Hugging Face models over a paged KV cache, and their weights.

Start with `stage/load_stage.py`.
"""
