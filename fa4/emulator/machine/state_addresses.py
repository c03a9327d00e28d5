"""The state of the machine as compiled code is told it: by address, in records of integers.

`fa4.emulator.machine.direct` reads them. Who makes one keeps it and what it points to alive.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NOWHERE = -1  # PLAN.places of a constant, or of what is dropped
MOST_WORDS = 8  # of one lane: .v8
FIXED, WITH_RANK, REGISTER_32, REGISTER_64 = range(4)  # PLAN.base: what an address starts from
ANY_SPACE, SHARED_SPACE, GLOBAL_SPACE = range(3)


def _integers(*names: str) -> Any:
    return np.dtype([(name, np.int64) for name in names])


# registers: its register file. shared_base: the shared address of its CTA's byte 0; smem: where
# that byte is. known, ids: its vector of epochs. shadow: of shared memory, 0 if nothing is checked.
# buffers: where the address of the table of BUFFERs and their number stand.
WARP = _integers(
    *("registers", "shared_base", "shared_end", "smem", "shadow", "buffers"),
    *("row", "cluster", "known", "ids"),
)
# start, end: its addresses. data: where its bytes are. shadow: 0 if it has none yet.
BUFFER = _integers("start", "end", "data", "writable", "shadow")
# base, register: what an address starts from, and where that stands in the register file; fixed:
# what is added. Of the `words` integers of `word_bytes` that a lane moves: the place of lane 0 in
# the register file (or NOWHERE), the bytes from lane to lane, and the bytes that are written.
# constants: what is stored instead of a register. access: as in a shadow's record.
PLAN = np.dtype(
    [
        *((name, np.int64) for name in ("space", "base", "register", "fixed", "is_write")),
        *((name, np.int64) for name in ("size_bytes", "words", "word_bytes", "signed", "access")),
        *((name, np.int64, (MOST_WORDS,)) for name in ("places", "strides", "widths", "constants")),
    ]
)
