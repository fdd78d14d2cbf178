"""`draftline demo`.

`build_store.py` makes the bundled store, `train_models.py` the bundled models. Start with
`command.py`.
"""
