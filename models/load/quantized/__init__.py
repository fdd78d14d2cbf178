"""Weights of quantised checkpoints, taken back to floating point as they are read.

Start with `quantized_files.py`; which layouts are known says `quantization_config.py`.
"""
