"""Log lines and spans of a server, without any text of requests.

Start with `request_log.py`; `spans.py` makes the spans of a request.
"""
