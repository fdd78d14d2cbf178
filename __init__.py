"""draftline: lossless speculative decoding for large language models, served on Ray."""

__version__ = "0.1.0"
