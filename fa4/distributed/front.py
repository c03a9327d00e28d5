"""`fa4.distributed.attention`: a call on every rank of a group, each with its part of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from fa4.config import Window, require
from fa4.distributed.blocks import SequenceMask
from fa4.distributed.chosen import GroupPlace, choose, hosts_of, known_machine
from fa4.distributed.default_group import keep_no_default_group
from fa4.distributed.layout import RowLayout, check_offsets, make_layout
from fa4.distributed.methods import check_spec
from fa4.distributed.plan import Sizes, Spec

ORDERS = ("fast", "exact")
TRANSPORTS = ("group", "peers")
EXACT_TILE = 256  # rows of a call whose bits do not depend on the number of ranks

Agreed = tuple[list[int], GroupPlace]  # rows of every rank; where the group runs
# By group, as long as there is one: another may get its address.
_known: WeakKeyDictionary[Any, dict[tuple[str, ...], Agreed]] = WeakKeyDictionary()


@torch.compiler.disable
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    group: Any = None,
    layout: str | RowLayout = "zigzag",
    method: str = "auto",
    degree: int = 1,
    causal: bool = False,
    window_size: Window = (None, None),
    cu_seqlens: Any = None,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    learnable_sink: Any = None,
    order: str = "fast",
    impl: Any = "auto",
    transport: str = "group",
    return_lse: bool = False,
) -> Any:
    """softmax(softmax_scale q k^T) v over the rows of all ranks, for this rank's rows.

    Args:
        q, k, v: torch tensors (B, rows, heads, dim), or (rows, heads, dim) of packed documents:
            what `shard` gives this rank. KV heads may be fewer than query heads, and travel so.
        group: a process group or one-dimensional device mesh; None: all ranks.
        layout: a `RowLayout`, or a name of `fa4.distributed.layout.LAYOUTS`.
        method: one of `fa4.distributed.methods.METHODS` but tree, or "auto": what the simulator
            finds fastest on this GPU (`fa4.distributed.chosen`); on a CPU halo for a window to the
            left, all_gather for order="exact", otherwise ring.
        degree: of Ulysses inside "ring+ulysses".
        causal, window_size: as in `fa4.flash_attn_func`, in positions of the whole sequence.
        cu_seqlens: offsets of packed documents in the whole sequence: 0, ..., its rows.
        softmax_scale, softcap: as in `fa4.flash_attn_func`.
        learnable_sink: (heads,) on every rank; its gradient is that of this rank's rows.
        order: "exact": the same bits for any number of ranks and any layout cut at multiples of 256
            rows, for twice the products in the backward pass.
        impl: a name of `fa4.flash_attn_func`, or a `fa4.distributed.public.BlockKernel`.
        transport: "group", by the group's back end, or "peers", by copy engines (CUDA, one host).

    Returns:
        out as q, differentiable; with return_lse (out, lse), lse (B, heads, rows) or (heads, rows).

    Raises:
        ValueError, TypeError: one line, what is wrong; where ranks disagree, on every rank and
        before anything is sent (over NCCL alone: when a call of this form is made first).
        ConnectionError: a rank is gone, or silent for the group's time-out.

    Under torch.compile the call is a graph break.
    """
    require_tensors(q, k, v)
    given = tuple(x[None] if x.dim() == 3 else x for x in (q, k, v))
    options = {
        "layout": layout.digest if isinstance(layout, RowLayout) else layout, "method": method,
        "degree": degree, "causal": bool(causal), "window_size": tuple(window_size),
        "cu_seqlens": _offsets(cu_seqlens), "softmax_scale": softmax_scale,
        "softcap": float(softcap), "order": order, "transport": transport,
        "sink": learnable_sink is not None,
    }  # fmt: skip
    group = process_group(group)
    lengths, place = agree(group, given, options)
    spec = make_spec(lengths, given, layout, options, place)
    from fa4.distributed import recorded
    from fa4.distributed.public import PublicKernel

    kernel = PublicKernel(impl) if isinstance(impl, str) else impl
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    job = recorded.ShardedCall(spec, _rank(group), group, kernel, scale, float(softcap), transport)
    mine, keys, values = given
    out, lse = recorded.attend(job, mine, keys, values, learnable_sink)
    if q.dim() == 3:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def require_tensors(q: Any, k: Any, v: Any) -> None:
    """TypeError or ValueError for what is no q, k, v of one rank."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a torch tensor; got {type(x).__name__}")
        if x.dim() not in (3, 4) or x.dim() != q.dim():
            raise ValueError(f"{name} must have rank 4, or 3 if packed; got {tuple(x.shape)}")
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(f"{name} must be {q.dtype} on {q.device}; got {x.dtype} on {x.device}")
    if k.shape[:-1] != v.shape[:-1] or k.shape[-1] != q.shape[-1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"k must have v's rows and heads and q's head dim; got {shapes}")
    if q.shape[:-2] != k.shape[:-2]:
        raise ValueError(
            f"q and k must have the same batch and rows; got {tuple(q.shape)}, {tuple(k.shape)}"
        )


def _offsets(cu_seqlens: Any) -> tuple[int, ...]:
    if cu_seqlens is None:
        return ()
    return tuple(
        int(x) for x in (cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens)
    )


def process_group(group: Any) -> Any:
    """A group from a group, a one-dimensional device mesh, or None for all ranks."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise ValueError("group must be one of torch.distributed: call init_process_group first")
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "get_group"):
        require(group.ndim == 1, "a device mesh must have one dimension", group.ndim)
        return group.get_group()
    return group


def _rank(group: Any) -> int:
    import torch.distributed as dist

    return int(dist.get_rank(group))


def agree(group: Any, given: tuple[Any, ...], options: dict[str, Any]) -> Agreed:
    """Rows of every rank, and where the group runs as rank 0 has it, if all are about to do the
    same; otherwise ValueError on all of them.

    Where a group has a CPU backend that is asked at each call, otherwise at the first of a form: to
    ask over NCCL would make the host wait for the GPU.
    """
    import torch.distributed as dist

    from fa4.distributed.group import require_agreement

    known = options["transport"] in TRANSPORTS
    require(known, f"transport must be one of {', '.join(TRANSPORTS)}", options["transport"])
    q, k, v = given
    mine = {
        **options,
        "batch": q.shape[0],
        "heads": (q.shape[2], k.shape[2]),
        "head dims": (q.shape[3], v.shape[3]),
        "type": str(q.dtype),
        "device": q.device.type,
        "gradient": any(x.requires_grad for x in (q, k, v)),
        "rows_": q.shape[1],
    }
    known_here = _known.setdefault(group, {})
    key = tuple(repr(value) for value in mine.values())
    on_cpu = "gloo" in str(dist.get_backend_config(group))
    if on_cpu or key not in known_here:
        mine["place_"] = _place(q, group, options["transport"])
        found = require_agreement(group, mine)
        known_here[key] = [x["rows_"] for x in found], found[0]["place_"]
    return known_here[key]


def _place(q: Any, group: Any, transport: str) -> GroupPlace:
    import torch.distributed as dist

    name = torch.cuda.get_device_name(q.device) if q.is_cuda else ""
    return GroupPlace(known_machine(name), hosts_of(dist.get_world_size(group)), transport)


def make_spec(
    lengths: Sequence[int],
    given: tuple[Any, ...],
    layout: str | RowLayout,
    options: dict[str, Any],
    place: GroupPlace,
) -> Spec:
    """The checked spec of a call. ValueError for rows that are not those of the layout."""
    q, k, v = given
    total, offsets = sum(lengths), options["cu_seqlens"]
    require(
        options["order"] in ORDERS, f"order must be one of {', '.join(ORDERS)}", options["order"]
    )
    exact = options["order"] == "exact"
    if isinstance(layout, str):
        tile = EXACT_TILE if exact else 1
        layout = make_layout(layout, total, len(lengths), cu_seqlens=offsets, tile=tile)
    if layout.lengths != tuple(lengths):
        raise ValueError(
            f"rows must be those of layout {layout.name} of {total}: {list(layout.lengths)}; "
            f"got {list(lengths)}"
        )
    left, right = (None if side in (None, -1) else int(side) for side in options["window_size"])
    mask = SequenceMask(left, 0 if options["causal"] else right, check_offsets(offsets, total))
    batch, _, heads, dim = q.shape
    sizes = Sizes(heads, k.shape[2], dim, v.shape[3], max(1, batch), q.element_size())
    tile, degree = EXACT_TILE if exact else 0, options["degree"]
    spec = Spec(options["method"], layout, layout, mask, sizes, degree=degree, tile=tile)
    return choose(spec, place) if options["method"] == "auto" else check_spec(spec)


def shard(x: Any, layout: RowLayout, rank: int, dim: int = 1) -> Any:
    """This rank's rows of a whole tensor: `layout.shard`."""
    return layout.shard(x, rank, dim)


def positions(layout: RowLayout, rank: int, device: Any = None) -> Any:
    """(rows,) positions of this rank's rows in the whole sequence, for rotary embeddings."""
    return torch.from_numpy(layout.positions(rank)).to(device)


def unshard(x: Any, layout: RowLayout, group: Any = None, dim: int = 1) -> Any:
    """The whole tensor on every rank, from the parts of all; without gradients."""
    from fa4.distributed.group import gather_objects

    parts = gather_objects(process_group(group), x.detach().cpu())
    return layout.unshard([part.to(x.device) for part in parts], dim)


keep_no_default_group()
