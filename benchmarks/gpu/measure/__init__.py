"""What the GPU benchmark measures, a part of the engine in each file.

Start with `attention.py`.
"""
