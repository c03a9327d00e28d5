"""The front door: real CuTe-DSL programs, run on the CPU up to their kernel launches and through.

`launch` calls one compiled function, `emulate` redirects a whole program. CuTe-DSL and torch are
imported when one of them is used, not before.
"""

from fa4.emulator.host.session import Session, emulate, launch
from fa4.emulator.machine.launch_record import Allocation, Launch

__all__ = ["Allocation", "Launch", "Session", "emulate", "launch"]
