"""`draftline doctor --cluster`: what the nodes of a Ray cluster have, and what to expect of them.

Start with `command.py`; `node_facts.py` and `link_meter.py` run on the nodes.
"""
