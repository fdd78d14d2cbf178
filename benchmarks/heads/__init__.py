"""Benchmarks of trained heads: their training's memory."""
