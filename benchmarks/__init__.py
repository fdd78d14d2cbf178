"""Benchmarks; each prints what README and docs quote."""
