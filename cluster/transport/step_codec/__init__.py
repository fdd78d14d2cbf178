"""Steps as deltas: what differs from what a stage has cached of earlier ones, by request slot.

`encoder.py` is the sender's end and `decoder.py` a stage's; `cached.py` holds what both keep alike,
and `step_delta.py` what travels. Start with `encoder.py`.
"""

from __future__ import annotations
