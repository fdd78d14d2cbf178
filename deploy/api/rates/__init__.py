"""What a tenant may send in a minute and at once, counted in memory or in Redis.

Start with `gate.py`; `admission.py` is where requests pass it.
"""
