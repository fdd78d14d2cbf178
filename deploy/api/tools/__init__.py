"""Tools and reasoning: templates and grammars for requests, parsers for answers.

Start with `chat_plan.py`.
"""
