"""What layers without attention keep of each request: states, and inputs of short convolutions.

Start with `state_pool.py`; `modules.py` gives transformers' own layers access to it.
"""
