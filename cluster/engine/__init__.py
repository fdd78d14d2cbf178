"""The engine's thread and what watches over it."""
