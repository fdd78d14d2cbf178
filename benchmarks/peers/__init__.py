"""draftline beside transformers and vLLM: `python -m draftline.benchmarks.peers`."""
