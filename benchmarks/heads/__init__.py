"""Benchmarks of trained heads."""
