"""Settings of a server: files, tenants, limits, and who may be served.

Start with `settings.py`.
"""
