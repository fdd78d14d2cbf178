"""Steps as differences against what a stage has kept of earlier ones, by request slot.

`encoder.py` is the sender's end and `decoder.py` a stage's; `kept.py` holds what both keep alike,
and `step_difference.py` what travels. Start with `encoder.py`.
"""

from __future__ import annotations
