"""Steps as differences against what a stage has kept of earlier ones, by request slot.

Start with `step_encoder.py`; `step_difference.py` is what travels.
"""
