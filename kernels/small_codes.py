"""Numbers of 4-bit and FP8 codes that the kernels of CPUs and GPUs share."""

# The largest code of 4 bits.
LARGEST_UINT4 = 15
# Makes up for the exponent's bias of an e4m3 code whose bits are read as those of a float32.
E4M3_SHIFT = 2.0**120
# Largest scale with which that is finite.
LARGEST_E4M3_SCALE = 2.0**7
