"""What GPUs can do, by their data sheets; the shares of it that are reached are an H200's."""

from __future__ import annotations

from dataclasses import dataclass

from .cost_profile import Device

# What products of one row reach of the memory's rate, products of many rows of the arithmetic, and
# attention of trees of it: as in the bundled profiles, and as an H200 does
# (`python -m draftline.benchmarks.gpu.measure.against_profile`).
BANDWIDTH_SHARE, OPERATIONS_SHARE, ATTENTION_SHARE = 0.85, 0.6, 0.28
GIB = 2.0**30


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A kind of GPU.

    memory      bytes
    bandwidth   bytes a second of it
    operations  a second, dense products of 16 bits
    """

    name: str
    memory: float
    bandwidth: float
    operations: float

    @property
    def device(self) -> Device:
        """As cost profiles have it."""
        return Device(
            bandwidth=self.bandwidth,
            bandwidth_share=BANDWIDTH_SHARE,
            operations=self.operations,
            operations_share=OPERATIONS_SHARE,
            attention_share=ATTENTION_SHARE,
        )


# By NVIDIA's data sheets; a name that holds another stands before it.
DEVICE_TYPES = (
    DeviceType("B200", 180 * GIB, 8.0e12, 2250e12),
    DeviceType("H200", 141e9, 4.8e12, 989e12),
    DeviceType("H100 NVL", 94e9, 3.9e12, 835e12),
    DeviceType("H100 PCIe", 80 * GIB, 2.0e12, 756e12),
    DeviceType("H100", 80 * GIB, 3.35e12, 989e12),
    DeviceType("A100-SXM4-40GB", 40 * GIB, 1.555e12, 312e12),
    DeviceType("A100 80GB PCIe", 80 * GIB, 1.935e12, 312e12),
    DeviceType("A100", 80 * GIB, 2.039e12, 312e12),
    DeviceType("L40S", 48 * GIB, 864e9, 362e12),
    DeviceType("A10G", 24 * GIB, 600e9, 70e12),
    DeviceType("L4", 24 * GIB, 300e9, 121e12),
    DeviceType("T4", 16 * GIB, 320e9, 65e12),
)


def device_type(name: str) -> DeviceType | None:
    """The kind of the GPU that `nvidia-smi` calls so; None: it is not known here."""
    words = name.replace("-", " ").split()
    for kind in DEVICE_TYPES:
        if set(kind.name.replace("-", " ").split()) <= set(words):
            return kind
    return None
