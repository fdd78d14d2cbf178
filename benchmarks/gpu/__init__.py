"""How near a stage is to what its GPU can do: `python -m draftline.benchmarks.gpu`."""
