"""What the tensor core's instructions refuse."""

from __future__ import annotations

from fa4.emulator.errors import EmulatorError


class DescriptorError(EmulatorError):
    """A descriptor, or a combination of an instruction with its descriptors, is invalid."""

    kind = "descriptor"  # of the finding


class TmemError(EmulatorError):
    """A tensor memory address, shape or allocation is invalid."""

    kind = "tmem"
