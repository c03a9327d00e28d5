"""Control flow of a kernel: postdominators (where diverged lanes meet again) and liveness."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def postdominators(successors: Sequence[Sequence[int]]) -> list[int]:
    """The immediate postdominator of each node, -1 where only the exit is one.

    A node without successors leads to the virtual exit. Nodes that never reach an exit (endless
    loops) get -1. Cooper, Harvey, Kennedy: "A simple, fast dominance algorithm", on the reversed
    graph.
    """
    count = len(successors)
    leave = count
    forward = [list(nodes) or [leave] for nodes in successors] + [[]]
    backward: list[list[int]] = [[] for _ in range(count + 1)]
    for node, nodes in enumerate(forward):
        for target in nodes:
            backward[target].append(node)
    order = _postorder(backward, leave)
    rank = {node: position for position, node in enumerate(order)}
    immediate: dict[int, int] = {leave: leave}

    def meet(a: int, b: int) -> int:
        while a != b:
            while rank[a] < rank[b]:
                a = immediate[a]
            while rank[b] < rank[a]:
                b = immediate[b]
        return a

    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            known = [target for target in forward[node] if target in immediate]
            if not known:
                continue
            best = known[0]
            for target in known[1:]:
                best = meet(best, target)
            if immediate.get(node) != best:
                immediate[node] = best
                changed = True
    return [-1 if immediate.get(n, leave) == leave else immediate[n] for n in range(count)]


def _postorder(edges: Sequence[Sequence[int]], start: int) -> list[int]:
    order: list[int] = []
    seen = {start}
    stack = [(start, iter(edges[start]))]
    while stack:
        node, children = stack[-1]
        for child in children:
            if child not in seen:
                seen.add(child)
                stack.append((child, iter(edges[child])))
                break
        else:
            order.append(node)
            stack.pop()
    return order


def live_out(
    successors: Sequence[Sequence[int]],
    uses: Sequence[set[str]],
    defines: Sequence[set[str]],
    asked: Sequence[Iterable[str]],
) -> list[set[str]]:
    """Which of the names asked for at each node are read on some path after it.

    uses: names a node reads before writing them. defines: names it always writes.
    """
    numbers: dict[str, int] = {}

    def bits(names: set[str]) -> int:
        value = 0
        for name in names:
            value |= 1 << numbers.setdefault(name, len(numbers))
        return value

    used = [bits(names) for names in uses]
    kept = [~bits(names) for names in defines]
    live = list(used)
    out = [0] * len(used)
    changed = True
    while changed:
        changed = False
        for node in range(len(used) - 1, -1, -1):
            after = 0
            for target in successors[node]:
                after |= live[target]
            out[node] = after
            before = used[node] | (after & kept[node])
            if before != live[node]:
                live[node] = before
                changed = True
    return [
        {name for name in names if name in numbers and value >> numbers[name] & 1}
        for value, names in zip(out, asked, strict=True)
    ]
