"""The last stage's choice of tokens, in torch.

Start with `sampler.py`.
"""
