"""`draftline demo`.

`command.py` serves and compares, `client.py` streams, `screen.py` prints; `build_store.py` makes
the store. Start with `command.py`.
"""
