"""llama.cpp on the same weights: a file that it reads, its server, its library at batch 1.

Start with `gguf_file.py`.
"""
