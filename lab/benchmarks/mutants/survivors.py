"""Changes that no test notices, and why each changes nothing that the package promises."""

from __future__ import annotations

# (file, line before, line after) -> why.
WHY: dict[tuple[str, str, str], str] = {
    (
        "fa4/reference/spec.py",
        "continue",
        "break",
    ): "equivalent: lists of partial blocks are always there, so only the last pair is passed over",
    (
        "fa4/sim/trace.py",
        'events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))',
        'events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 1.0)))',
    ): "equivalent: only metadata has no time, and it is sorted before everything else",
    (
        "fa4/sim/measurements.py",
        "texts = dict(zip(header, cells, strict=True))",
        "texts = dict(zip(header, cells, strict=False))",
    ): "equivalent: rows of another length were refused before; guards against a later change",
    (
        "fa4/plan/forward_layout.py",
        'layout.add("q", "smem", q_bytes, stages=q_tiles, align=1024)',
        'layout.add("q", "smem", q_bytes, stages=q_tiles, align= 2048)',
    ): "equivalent: Q is the first region, at 0 with any alignment",
    (
        "fa4/reference/dropout.py",
        "keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _WEYL, strict=True)]",
        "keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _WEYL, strict=False)]",
    ): "equivalent: two keys and two constants; the check guards against a later change",
    (
        "fa4/sim/measurements.py",
        "value = 0",
        "value = -1",
    ): "equivalent: stands for what is no number, and the next line refuses all below 1",
    (
        "fa4/sim/sweep.py",
        "@lru_cache(maxsize=65536)",
        "@lru_cache(maxsize= 131072)",
    ): "only memory: how many results are remembered, not which",
    (
        "fa4/sim/sweep.py",
        "pool.shutdown(cancel_futures=True)",
        "pool.shutdown(cancel_futures=False)",
    ): "reached with work left only when a sweep is interrupted, and then the process ends",
    (
        "fa4/sim/engine.py",
        "if log.shape[0] > 0:",
        "if log.shape[0] > 1:",
    ): "equivalent: a log has no row or room for thousands",
    (
        "fa4/sim/engine.py",
        "compiled: Any = partial(numba.njit, cache=True, nogil=True, _nrt=False)",
        "compiled: Any = partial(numba.njit, cache=True, nogil=False, _nrt=False)",
    ): "only lets other threads of the process run meanwhile; the results are the same",
    (
        "fa4/reference/tiles.py",
        "chosen = (state == BLOCK_FULL) | ((state == BLOCK_PARTIAL) & chosen)",
        "chosen = (state == BLOCK_FULL) ^ ((state == BLOCK_PARTIAL) & chosen)",
    ): "equivalent: a block is not both full and partial",
    (
        "fa4/reference/forward.py",
        "lse = np.full((heads, seqlen_q), -np.inf, run.work)",
        "lse = np.full((heads, seqlen_q), +np.inf, run.work)",
    ): "equivalent: the blocks of rows cover all rows, and each writes its own",
    (
        "fa4/sim/trace.py",
        'events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0)))',
        'events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", -1.0)))',
    ): "equivalent: only metadata has no time, and it is sorted before everything else",
    (
        "fa4/sim/chip.py",
        "spans = [np.diff(run.tile_ends, prepend=0.0) for run in runs]",
        "spans = [np.diff(run.tile_ends, prepend= 1.0) for run in runs]",
    ): "equivalent: only the difference of both spans is used, and the start cancels",
    (
        "fa4/plan/work.py",
        "return Math(alu=columns + 4 * columns / FRAGMENT, other=columns / FRAGMENT)",
        "return Math(alu=columns + 4 * columns / FRAGMENT, other=columns // FRAGMENT)",
    ): "equivalent: plans refuse tiles that are no multiple of a fragment",
    (
        "fa4/plan/phase_rules.py",
        "for total in range(1, MOST_TRIPS + 1):",
        "for total in range(1, MOST_TRIPS + 0):",
    ): "equivalent: counts grow by a loop's body per trip from the second on, so that what differs "
    "with four trips differs with three",
    (
        "fa4/sim/options.py",
        'if getattr(pipeline, "element_bytes", 0) != element_bytes(problem.dtype):',
        'if getattr(pipeline, "element_bytes", 1) != element_bytes(problem.dtype):',
    ): "equivalent: every pipeline has element_bytes, and the default is never taken",
    (
        "fa4/plan/schema.py",
        "cold: bool = False",
        "cold: bool = True",
    ): "equivalent: every plan says of each load whether it is cold, and of stores nobody asks",
    (
        "fa4/sim/chip.py",
        "imbalance = max(0.0, 1.0 - mean / last)  # not below 0 by rounding",
        "imbalance = max( -1.0, 1.0 - mean / last)  # not below 0 by rounding",
    ): "guards against a rounding error of 1e-16: the mean is at most the last",
    (
        "fa4/sim/sweep_file.py",
        "row = dict(zip(columns, line, strict=True))",
        "row = dict(zip(columns, line, strict=False))",
    ): "equivalent: a line of another length has been refused just before",
    (
        "fa4/sim/engine_python.py",
        "return max((times[phase] for times in moments), default=0.0)",
        "return max((times[phase] for times in moments), default= -1.0)",
    ): "equivalent: the role goes on at the later of this and its own time, which is never below 0",
    (
        "fa4/reference/tiles.py",
        "heads_k = tiles[0].shape[0]",
        "heads_k = tiles[ -1].shape[0]",
    ): "equivalent: K and V have as many heads",
    (
        "fa4/sim/calibrate.py",
        "if trial_value < value:",
        "if trial_value <= value:",
    ): "equivalent: the search returns its start unless it finds a smaller value",
    (
        "fa4/sim/calibrate.py",
        "FIRST_RADIUS, LEAST_RADIUS, MOST_RADIUS = 0.25, 0.004, 0.6  # of the ranges",
        "FIRST_RADIUS, LEAST_RADIUS, MOST_RADIUS = 0.125, 0.004, 0.6  # of the ranges",
    ): "where the search begins, not what it finds: planted constants are recovered either way",
    (
        "fa4/sim/chip.py",
        "longer = short + (missing > 0)[:, None] * period",
        "longer = short + (missing != 0)[:, None] * period",
    ): "equivalent: what is missing is a maximum of 0 and something",
    (
        "fa4/sim/engine_python.py",
        "moment = max(start, role.last_done.get(b, 0.0)) if b >= 0 else start",
        "moment = max(start, role.last_done.get(b, 0.0)) if b >= -1 else start",
    ): "equivalent: asynchronous work has a unit, so that nothing is kept under -1, and no role's "
    "time is below the default of 0",
    (
        "fa4/testing/adapters/flex.py",
        "return (out[0], lse[0]) if return_lse else out[0]",
        "return (out[0], lse[ -1]) if return_lse else out[0]",
    ): "equivalent: packed sequences are one batch entry there, made so two lines above",
    (
        "fa4/reference/generations/flash3.py",
        'phases.append(products if tile == 0 else (*products, Op("values", tile - 1)))',
        'phases.append(products if tile <= 0 else (*products, Op("values", tile - 1)))',
    ): "equivalent: tiles are counted from 0",
    (
        "fa4/testing/plain.py",
        "total = np.where(self.total > 0, self.total, 1)",
        "total = np.where(self.total > 0, self.total, 2)",
    ): "equivalent: where the sum is 0, so is each of its terms, whatever divides them",
    (
        "fa4/testing/bounds.py",
        "top = np.where(top > 0.0, top, 1.0)",
        "top = np.where(top > 0.0, top, 0.5)",
    ): "equivalent: where the largest weight is 0, all are, and the result with them",
    (
        "fa4/plan/published_backward.py",
        'layout.add("k_t", "smem", 2 * tile * d // 2, align=1024)',
        'layout.add("k_t", "smem", 2 * tile * d // 2, align= 512)',
    ): "equivalent: head dims are multiples of 16, so that every region before it ends at a "
    "multiple of 1024 bytes",
    (
        "fa4/sim/calibrate.py",
        "slopes = model.slopes(best, radius / 3)",
        "slopes = model.slopes(best, radius / 4)",
    ): "only how far apart the points of a slope are: planted constants are found with either",
    (
        "fa4/testing/adapters/flash_attn_2.py",
        "one_head_dim(arrays[0], arrays[2])",
        "one_head_dim(arrays[ 1], arrays[2])",
    ): "equivalent: the kit gives Q and K one head dim",
    (
        "fa4/sim/calibrate.py",
        "share = (evaluations - count) // (len(starts) + 1)",
        "share = (evaluations % count) // (len(starts) + 1)",
    ): "only how the evaluations are shared among the starts of a search: what is planted is "
    "found with either",
    (
        "fa4/plan/backward_single.py",
        'layout.add("do", "smem", tile * dv, align=1024)',
        'layout.add("do", "smem", tile * dv, align= 2048)',
    ): "equivalent: head dims are multiples of 16, so that dO begins at a multiple of 4096 bytes",
    (
        "fa4/sim/lower.py",
        "self.code.append((END, start, 0, 0))",
        "self.code.append((END, start, 0, 1))",
    ): "equivalent: the end of a loop has one operand, and the others are not read",
    (
        "fa4/plan/published_backward.py",
        'layout.add("v", "smem", tile * dv, align=1024)',
        'layout.add("v", "smem", tile * dv, align= 2048)',
    ): "equivalent: head dims are multiples of 16, so that V begins at a multiple of 2048 bytes",
    (
        "fa4/reference/exp2.py",
        "step = np.where((error > 0.0) == (total > 0.0), 1, -1)",
        "step = np.where((error >= 0.0) == (total > 0.0), 1, -1)",
    ): "equivalent: an error of 0 is exact, and what is exact takes no step",
    (
        "fa4/testing/isolation.py",
        "self._listener.join(1.0)  # so that its last words are here",
        "self._listener.join( 2.0)  # so that its last words are here",
    ): "only how long what a process said last is waited for",
    (
        "fa4/testing/state.py",
        "inputs = [build_inputs(replace(case, seed=case.seed + n)) for n in range(2)]",
        "inputs = [build_inputs(replace(case, seed=case.seed + n)) for n in range( 3)]",
    ): "equivalent: there are two threads, and the third call is of none of them",
    (
        "fa4/testing/sessions/session.py",
        "case, rng = self.case, np.random.default_rng([self.case.seed, self.drawn, 8])",
        "case, rng = self.case, np.random.default_rng([self.case.seed, self.drawn, 9])",
    ): "equivalent: other random keys; rows have a number more in their seed",
    (
        "fa4/testing/adapters/xformers.py",
        "if window == (-1, 0):",
        "if window <= (-1, 0):",
    ): "equivalent: a side is -1 at least, and a window without sides was before",
    (
        "fa4/testing/torch_function.py",
        "or min(strides, default=0) < 0",
        "or min(strides, default= 1) < 0",
    ): "equivalent: what has no strides has none below 0",
    (
        "fa4/testing/programs.py",
        'lines = ["import numpy as np", *["import ml_dtypes"] * (case.dtype == "bf16"), "",',
        'lines = ["import numpy as np", *["import ml_dtypes"] * (case.dtype <= "bf16"), "",',
    ): "equivalent: of the names of types bf16 is the first",
    (
        "fa4/testing/diagnosis.py",
        "seconds=SHRINK_SECONDS_ISOLATED if isolated else SHRINK_SECONDS,",
        "seconds=SHRINK_SECONDS_ISOLATED if not isolated else SHRINK_SECONDS,",
    ): "only time: how long a failure may be made smaller",
    (
        "fa4/testing/plain.py",
        "return np.where(self.visible, scores, -np.inf).astype(self.work, copy=False)",
        "return np.where(self.visible, scores, -np.inf).astype(self.work, copy=True)",
    ): "equivalent: nobody else has what was just made",
    (
        "fa4/testing/budget.py",
        "for name, parts in zip(Expected._fields[:4], lists, strict=True):",
        "for name, parts in zip(Expected._fields[:4], lists, strict=False):",
    ): "equivalent: four names and four lists; the check guards against a later change",
    (
        "fa4/testing/mla.py",
        '_SHRINKS = (SIZES | {"seqlen_q", "seqlen_k", "lengths"}) - {"head_dim", "head_dim_v"}',
        '_SHRINKS = (SIZES ^ {"seqlen_q", "seqlen_k", "lengths"}) - {"head_dim", "head_dim_v"}',
    ): "equivalent: these are not among SIZES",
    (
        "fa4/testing/adapters/flashinfer.py",
        "last = torch.where(used > 0, (used - 1) % size + 1, used)",
        "last = torch.where(used > 1, (used - 1) % size + 1, used)",
    ): "equivalent: of one key either way is one",
    (
        "fa4/testing/shrink.py",
        "patience: float = 1.0,",
        "patience: float = 2.0,",
    ): "only time: how long a busy machine may take to make a failure smaller",
    (
        "fa4/testing/sessions/tree.py",
        "for _ in range(MOST_NODES + 1):",
        "for _ in range(MOST_NODES + 2):",
    ): "equivalent: every node is at the root by then, and what is before the first node is seen",
}
