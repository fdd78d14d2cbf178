"""What gRPC servers of draftline share: listening, tokens, health, starting one as a child process.

Start with `listener.py`.
"""
