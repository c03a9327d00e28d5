"""What a B200, or for sm_90a an H200, answers when the host code asks the device about itself."""

from __future__ import annotations

from typing import Any

from fa4.emulator.errors import LaunchError

MULTIPROCESSORS = 148
MAX_SHARED_BYTES_PER_BLOCK = 232_448  # opt-in limit of dynamic plus static shared memory
L2_BYTES = 132_644_864
COMPUTE_CAPABILITY = (10, 0)
DRIVER_VERSION = 13_000
# The names above that an H200 answers otherwise (asked of one).
H200 = {"MULTIPROCESSORS": 132, "L2_BYTES": 62_914_560, "COMPUTE_CAPABILITY": (9, 0)}

# Numbers of cudaDeviceAttr (CUDA runtime API, driver_types.h) that CuTe-DSL programs ask for.
DEVICE_ATTRIBUTES = {
    1: 1024,  # cudaDevAttrMaxThreadsPerBlock
    2: 1024,  # cudaDevAttrMaxBlockDimX
    3: 1024,  # cudaDevAttrMaxBlockDimY
    4: 64,  # cudaDevAttrMaxBlockDimZ
    5: 2**31 - 1,  # cudaDevAttrMaxGridDimX
    6: 65_535,  # cudaDevAttrMaxGridDimY
    7: 65_535,  # cudaDevAttrMaxGridDimZ
    8: 49_152,  # cudaDevAttrMaxSharedMemoryPerBlock
    10: 32,  # cudaDevAttrWarpSize
    12: 65_536,  # cudaDevAttrMaxRegistersPerBlock
    39: 2048,  # cudaDevAttrMaxThreadsPerMultiProcessor
    81: 233_472,  # cudaDevAttrMaxSharedMemoryPerMultiprocessor
    82: 65_536,  # cudaDevAttrMaxRegistersPerMultiprocessor
    95: 1,  # cudaDevAttrCooperativeLaunch
    97: MAX_SHARED_BYTES_PER_BLOCK,  # cudaDevAttrMaxSharedMemoryPerBlockOptin
    106: 32,  # cudaDevAttrMaxBlocksPerMultiprocessor
    111: 1024,  # cudaDevAttrReservedSharedMemoryPerBlock
}


def device_attribute(number: int) -> int:
    """The value of a cudaDeviceAttr. Raises LaunchError for one that is not in the table."""
    changing = {
        16: MULTIPROCESSORS,  # cudaDevAttrMultiProcessorCount
        38: L2_BYTES,  # cudaDevAttrL2CacheSize
        75: COMPUTE_CAPABILITY[0],  # cudaDevAttrComputeCapabilityMajor
        76: COMPUTE_CAPABILITY[1],  # cudaDevAttrComputeCapabilityMinor
    }
    if number in changing:
        return changing[number]
    if number not in DEVICE_ATTRIBUTES:
        raise LaunchError(f"the host code asks for device attribute {number}, which is not known")
    return DEVICE_ATTRIBUTES[number]


def answers_of(arch: str) -> dict[str, Any]:
    """The values of this module that differ for an architecture, by name."""
    return H200 if arch.startswith("sm_90") else {}


def max_active_clusters(cluster_ctas: int) -> int:
    """How many clusters of one CTA per SM fit on the chip at once, if every SM can take part."""
    if not 1 <= cluster_ctas <= 32:
        raise LaunchError(f"cluster of {cluster_ctas} CTAs: 1 to 32 are allowed")
    return MULTIPROCESSORS // cluster_ctas
