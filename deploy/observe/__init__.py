"""What a server tells those who run it, beside its metrics: log lines and spans, without any text.

Start with `request_log.py`; `spans.py` makes the spans of a request.
"""
