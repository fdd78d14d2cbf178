"""Devices, and copies between them and the host.

Start with `device_choice.py`.
"""
