"""Drafters: numpy algorithms that propose and observe; torch only where one runs a model."""
