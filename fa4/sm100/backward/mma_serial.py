"""The MMA warp of a serial pair's leader: one query tile after the other, for both CTAs.

    S dP dK dV dQ | S' dP' dK' dV' dQ' ...

Q and dO come by rows, then by columns: the even and the odd phases of their signals.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from fa4.kit.rings import Ring
from fa4.kit.signals import Signals
from fa4.sm100.backward.mma import BackwardProducts, afresh, issue


@cute.jit
def mma_serial(signals: Signals, trips: Int32, products: BackwardProducts) -> None:
    """Every product of the work tile."""
    turn, rows = Ring.of(1), Ring.of(1)
    if trips > 0:
        signals.wait("k_t_full")
        for trip in cutlass.range(trips, unroll=1):
            _tile(signals, products, (turn, rows), trip > 0, afresh(trip))
            turn = turn.next()
        signals.commit("dv_full")
        signals.commit("dk_full")


def _tile(
    signals: Signals, products: BackwardProducts, turns: tuple, more: Boolean, zero: Int32
) -> None:
    """The products of a query tile."""
    turn, rows = turns
    columns = rows.next()
    signals.wait("q_full", rows)
    signals.wait("dq_empty", turn)
    issue(products, products.s, zero=zero)
    signals.commit("s_full")
    signals.commit("q_empty")
    signals.wait("do_full", rows)
    signals.wait("s_read", turn)
    issue(products, products.dp, zero=zero)
    signals.commit("dp_full")
    signals.commit("do_empty")
    signals.wait("q_full", columns)
    signals.wait("ds_full", turn)
    issue(products, products.dk, more=more, zero=zero)
    signals.commit("q_empty")
    signals.wait("do_full", columns)
    signals.wait("p_full", turn)
    issue(products, products.dv, more=more, zero=zero)
    signals.commit("do_empty")
    signals.wait("ds_relayed", turn)
    issue(products, products.dq, zero=zero)
    signals.commit("dq_full")
