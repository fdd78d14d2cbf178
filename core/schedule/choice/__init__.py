"""Which drafters are asked for which requests.

Start with `drafter_choice.py`.
"""
