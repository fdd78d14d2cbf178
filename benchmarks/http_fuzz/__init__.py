"""A fuzz run of the HTTP server: made-up requests beside steady streams. Read `run.py` first."""
