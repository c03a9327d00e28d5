"""The relay warp of a pair's CTA: tells the leader that the other's part of dS has come.

The leader's MMA warp can wait at the leader's barriers only, and what is stored into a CTA's shared
memory is counted by a barrier of that CTA.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.plan.backward_pair import EXCHANGED_BYTES


@cute.jit
def relay(signals: Signals, trips: Int32) -> None:
    """One message for each query tile."""
    turn = Ring.of(1)
    for _ in cutlass.range(trips, unroll=1):
        signals.expect_from_peer("ds_peer", EXCHANGED_BYTES)
        signals.wait("ds_peer", turn)
        # The peer stored with ordinary instructions; the tensor core reads by another way.
        cute.arch.fence_proxy("async.shared", space="cta")
        signals.arrive_once("ds_relayed")
        turn = turn.next()
