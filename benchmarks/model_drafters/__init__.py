"""Measures of small models as drafters."""
