"""C++ operators for float32 stages on CPUs, built where they run.

Start with `build.py`.
"""
