"""What is asked, of whom, and when: prompts, endpoints, load.

Start with `endpoint.py`.
"""
