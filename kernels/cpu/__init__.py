"""C++ operators for compiled stages on CPUs, built where they run.

Start with `build.py`.
"""
