"""The Ray Serve application.

Start with `serve_app.py`.
"""
