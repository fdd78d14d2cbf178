"""Training of heads that draft token by token: EAGLE, HASS, FSPAD, GRIFFIN and EAGLE-3, in passes.

Start with `passes.py`; `training_time_test.py` is EAGLE-3's.
"""
