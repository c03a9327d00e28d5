"""Registers that a softmax thread needs for pieces of so many keys, as the compiler has it.

    python -m lab.benchmarks.pieces

This package's forward kernel for sm_100a, whose KV tile is as wide as a piece, with less and less
registers for its softmax warps: loads and stores of local memory in the kernel, instructions of
the softmax loop. `fa4/plan/pieces_layout.py` has what follows. Needs CuTe-DSL and nvdisasm.
"""

from __future__ import annotations

from unittest import mock

from fa4.compiled.forward import compile_forward
from fa4.config import Exp2Split, ForwardConfig
from fa4.inspect.codegen import read_kernels
from fa4.plan import forward, forward_layout, forward_roles
from fa4.plan.forward_layout import RegisterBudget
from fa4.sm100.forward.spec import ForwardSpec

CORRECTION, OTHERS = 80, 64
TRIED = {64: (112, 104, 96, 88, 80), 96: (136, 128, 120), 128: (184, 176, 168)}
SPLIT = Exp2Split(frequency=10, start_fragment=0)


def main() -> None:
    """A line for each number of keys and registers."""
    for keys, budgets in TRIED.items():
        for softmax in budgets:
            budget = RegisterBudget(softmax, CORRECTION, OTHERS)
            parts = (forward, forward_layout, forward_roles)
            patched = [mock.patch.object(part, "registers", lambda _, x=budget: x)
                       for part in parts]  # fmt: skip
            numerics = ForwardConfig(tile_n=keys, exp2=SPLIT)
            spec = ForwardSpec(head_dim=128, head_dim_v=128, numerics=numerics)
            for one in patched:
                one.start()
            try:
                made = compile_forward(spec)
            finally:
                for one in patched:
                    one.stop()
            (code,) = read_kernels(made.artifacts.CUBIN, made.artifacts.PTX)
            loops = {loop.kind: loop.length for loop in code.known_loops}
            print(f"{keys} keys, {softmax} registers: {code.spill_loads} loads and "
                  f"{code.spill_stores} stores of local memory, "
                  f"{loops.get('softmax')} instructions a step")  # fmt: skip


if __name__ == "__main__":
    main()
