"""The algorithms, pure: standard library and numpy only."""
