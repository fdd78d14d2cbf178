"""Steps as deltas: what differs from what a stage has cached of earlier ones, by request slot.

`encoder.py` is the sender's end and `decoder.py` a stage's; `step_delta.py` has what travels and
what both cache. Start with `encoder.py`.
"""

from __future__ import annotations
