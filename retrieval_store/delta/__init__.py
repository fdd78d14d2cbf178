"""Learned text between two builds: logs, segments in memory, folding them in.

Start with `delta_log.py`.
"""
