"""Weights of quantised checkpoints, taken back to floating point as they are read.

Start with `quantized_files.py`; `quantization_config.py` has the supported layouts.
"""
