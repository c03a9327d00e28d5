"""One call on the SM100 kernel: what joins requests, compiled kernels and the emulator.

`Arguments` are what reaches the kernel, in plain types: the fields of the torch operator of
`fa4.front.op`, so that torch tensors and NumPy arrays take the same way from here on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fa4.arrays import is_torch, to_numpy
from fa4.compiled.build import build
from fa4.compiled.launch import launch_arguments
from fa4.compiled.support import ForwardCall, check
from fa4.compiled.variants import choose_spec, find_gpu
from fa4.config import BackwardConfig, ForwardConfig, Window, normalize_window, require_int
from fa4.dtypes import dtype_name
from fa4.hardware import B200, Gpu
from fa4.reference.spec import Attention
from fa4.request import as_float, as_int, build_request, check_shapes

# In the emulator a kernel has so many SMs: few, so that each CTA gets several work tiles.
EMULATED_SMS = 4

VECTORS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")

_TORCH_TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64",
    "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2",
}  # fmt: skip


class Extras(NamedTuple):
    """What an operator's schema cannot express; see `remember`."""

    score_mod: Callable[..., Any] | None = None
    mask_mod: Callable[..., Any] | None = None
    numerics: ForwardConfig | None = None


class Arguments(NamedTuple):
    """A call as the kernel sees it. extras: number of its `Extras`; aux: a list of tensors."""

    q: Any
    k: Any
    v: Any
    learnable_sink: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_q: Any
    seqused_k: Any
    aux: list[Any]
    softmax_scale: float
    window_left: int | None
    window_right: int | None
    softcap: float
    max_seqlen_q: int | None
    pack_gqa: bool | None
    extras: int

    @property
    def window(self) -> Window:
        """(left, right), None for an open side."""
        return self.window_left, self.window_right

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of O: as q, with v's head dimension."""
        return (*self.q.shape[:-1], self.v.shape[-1])

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """(B, Hq, Sq), or (Hq, total) of packed queries."""
        *batch, rows, heads, _ = self.q.shape
        return (*batch, heads, rows)


_numbers: dict[Extras, int] = {Extras(): 0}
_extras: list[Extras] = [Extras()]


def remember(extras: Extras) -> int:
    """A number that stands for these extras as long as the process lives."""
    if extras not in _numbers:
        _numbers[extras] = len(_extras)
        _extras.append(extras)
    return _numbers[extras]


def read_arguments(q: Any, k: Any, v: Any, options: dict[str, Any]) -> Arguments:
    """The arguments of a call with `flash_attn_varlen_func`'s options, which may lack some.

    Raises NotSupported for options that no kernel here has, TypeError and ValueError for values
    that are no option's. Tensors are not read.
    """
    _refuse_options(q, k, v, options)
    scale = options.get("softmax_scale")
    left, right = normalize_window(options["window_size"], bool(options["causal"]))
    longest = options.get("max_seqlen_q")
    config = options.get("config")
    configs = config if isinstance(config, tuple) else (config,)
    numerics = None
    for part in configs:
        if isinstance(part, ForwardConfig):
            numerics = part
        elif part is not None and not isinstance(part, BackwardConfig):
            raise TypeError(f"config must be a ForwardConfig or BackwardConfig; got {part!r}")
    extras = Extras(options.get("score_mod"), options.get("mask_mod"), numerics)
    return Arguments(
        q, k, v, options.get("learnable_sink"),
        options.get("cu_seqlens_q"), options.get("cu_seqlens_k"),
        options.get("seqused_q"), options.get("seqused_k"),
        list(options.get("aux_tensors") or ()),
        q.shape[-1] ** -0.5 if scale is None else as_float("softmax_scale", scale),
        left, right,
        as_float("softcap", options.get("softcap", 0.0)),
        None if longest is None else as_int("max_seqlen_q", longest),
        options.get("pack_gqa"),
        0 if extras == Extras() else remember(extras),
    )  # fmt: skip


def _refuse_options(q: Any, k: Any, v: Any, options: dict[str, Any]) -> None:
    """Raises NotSupported for what `Arguments` have no place for."""
    asked: dict[str, Any] = {
        "dropout_p": as_float("dropout_p", options.get("dropout_p", 0.0)),
        "num_splits": as_int("num_splits", options.get("num_splits", 1)),
        "paged": options.get("page_table") is not None,
        "block_sparse": options.get("block_sparse_tensors") is not None,
        "descale": any(options.get(f"{x}_descale") is not None for x in "qkv"),
    }
    require_int("num_splits", asked["num_splits"], 1, 256)
    if asked["dropout_p"] or asked["num_splits"] != 1 or any(list(asked.values())[2:]):
        sizes = {"heads_q": q.shape[-2], "heads_k": k.shape[-2], "batch": 1, "rows_q": 1}
        dims = {"head_dim": q.shape[-1], "head_dim_v": v.shape[-1], "rows_k": 1}
        check(ForwardCall(dtype=element_type(q), **sizes, **dims, **asked))


def element_type(tensor: Any) -> str:
    """ "bf16", "fp16", ... of a torch tensor or an array; TypeError for another type."""
    if not is_torch(tensor):
        return dtype_name(tensor.dtype)
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _TORCH_TYPES:
        raise TypeError(f"dtype must be one of {', '.join(_TORCH_TYPES.values())}; got {name}")
    return _TORCH_TYPES[name]


def _aux_type(tensor: Any) -> str:
    """Its element type; integers by their names, such as "int32"."""
    kind = str(tensor.dtype).removeprefix("torch.")
    return kind if kind.startswith(("int", "uint", "bool")) else element_type(tensor)


def describe(arguments: Arguments, *, lse: bool = True) -> ForwardCall:
    """The call without its tensors. Raises ValueError or TypeError for what does not fit."""
    a = arguments
    types = [element_type(x) for x in (a.q, a.k, a.v)]
    if len(set(types)) > 1:
        raise TypeError(f"q, k, v must share one dtype; got {', '.join(types)}")
    packed = a.cu_seqlens_q is not None, a.cu_seqlens_k is not None
    used = a.seqused_q is not None, a.seqused_k is not None
    shapes = tuple(tuple(x.shape) for x in (a.q, a.k, a.v))
    check_shapes(shapes, packed, varlen=any(packed + used))
    batch = a.cu_seqlens_q.shape[0] - 1 if packed[0] else a.q.shape[0]
    _check_vectors(a, batch)
    extras = _extras[a.extras]
    mods = extras.score_mod is not None or extras.mask_mod is not None
    return ForwardCall(
        dtype=types[0],
        head_dim=a.q.shape[-1],
        head_dim_v=a.v.shape[-1],
        heads_q=a.q.shape[-2],
        heads_k=a.k.shape[-2],
        batch=batch,
        rows_q=a.q.shape[-3],
        rows_k=a.k.shape[-3],
        max_seqlen_q=a.max_seqlen_q,
        softmax_scale=a.softmax_scale,
        window=a.window,
        lse=lse,
        sink=a.learnable_sink is not None,
        softcap=a.softcap,
        packed_q=packed[0],
        packed_k=packed[1],
        used_q=used[0],
        used_k=used[1],
        pack_gqa=a.pack_gqa,
        score_mod=extras.score_mod,
        mask_mod=extras.mask_mod,
        aux=tuple((_aux_type(x), len(x.shape)) for x in a.aux) if mods else (),
        numerics=extras.numerics,
    )


def _check_vectors(a: Arguments, batch: int) -> None:
    """Shapes and types of the sink and of the length vectors, and where they lie."""
    batch_k = a.k.shape[0] if a.cu_seqlens_k is None else a.cu_seqlens_k.shape[0] - 1
    if batch < 0 or batch_k < 0:
        raise ValueError("cu_seqlens must have at least one entry; got none")
    if batch_k != batch:
        raise ValueError(f"q has {batch} sequences, k has {batch_k}: they must agree")
    for name in VECTORS:
        vector, length = getattr(a, name), batch + name.startswith("cu_")
        if vector is None:
            continue
        if tuple(vector.shape) != (length,):
            raise ValueError(f"{name} must have {length} entries; got shape {tuple(vector.shape)}")
        kind = str(vector.dtype).removeprefix("torch.")
        if not kind.startswith(("int", "uint")):
            raise TypeError(f"{name} must hold integers; got dtype {kind}")
    sink, heads = a.learnable_sink, a.q.shape[-2]
    if sink is not None and tuple(sink.shape) != (heads,):
        raise ValueError(f"learnable_sink must be ({heads},); got shape {tuple(sink.shape)}")
    if not is_torch(a.q):
        return
    for name, value in zip(a._fields, a, strict=True):
        if is_torch(value) and value.device != a.q.device:
            raise ValueError(f"{name} must be on {a.q.device}, as q is; got {value.device}")


def run_on_gpu(arguments: Arguments, *, lse: bool = True) -> tuple[Any, Any]:
    """(O, LSE) by the kernel of the GPU that the tensors are on, on torch's current stream.

    The host never waits for the GPU. Raises ValueError for a GPU without a kernel, ImportError
    without CuTe-DSL, NotSupported and ValueError for calls that the kernel refuses: nothing is
    launched then.
    """
    import torch

    device = arguments.q.device
    gpu = find_gpu(torch.cuda.get_device_capability(device))
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def start(kernel: Any, *values: Any) -> None:
        with torch.cuda.device(device):
            kernel(*values)

    return _run(arguments, gpu, num_sms, start, lse)


def run_on_emulator(
    arguments: Arguments, *, lse: bool = True, **options: Any
) -> tuple[Any, Any, list[Any]]:
    """(O, LSE, the emulator's reports) by B200's kernel on the CPU.

    options: of `fa4.emulator.launch`. Raises `fa4.emulator.EmulationFailed` if a check found
    something, otherwise as `run_on_gpu`; sequence lengths are checked too.
    """
    from fa4 import emulator

    reports: list[Any] = []

    def start(kernel: Any, *values: Any) -> None:
        reports.extend(emulator.launch(kernel, *values, **options))

    call = describe(arguments)
    build_request(arguments.q, arguments.k, arguments.v, options_of(arguments), varlen=True)
    check(call)
    return *_run(arguments, B200, EMULATED_SMS, start, lse), reports


def options_of(arguments: Arguments) -> dict[str, Any]:
    """The options of `flash_attn_varlen_func` that mean the same."""
    a, extras = arguments, _extras[arguments.extras]
    names = ("learnable_sink", *VECTORS, "softmax_scale", "softcap", "max_seqlen_q", "pack_gqa")
    return {name: getattr(a, name) for name in names} | {
        "window_size": tuple(None if side is None else int(side) for side in a.window),
        "aux_tensors": a.aux or None,
        "score_mod": extras.score_mod,
        "mask_mod": extras.mask_mod,
        "config": extras.numerics,
    }


def _run(
    a: Arguments, gpu: Gpu, num_sms: int, start: Callable[..., None], lse: bool
) -> tuple[Any, Any]:
    call = describe(a, lse=lse)
    Attention(  # refuses combinations without a meaning
        softmax_scale=a.softmax_scale, window=a.window, softcap=a.softcap,
        score_mod=call.score_mod, mask_mod=call.mask_mod,
    )  # fmt: skip
    spec = choose_spec(call, gpu)
    outputs = _allocate(a, call)
    if call.is_empty:
        return outputs
    vectors: dict[str, Any] = {name: _vector(getattr(a, name), "int32") for name in VECTORS}
    vectors["sink"] = _vector(a.learnable_sink, "float32")
    vectors["aux"] = tuple(a.aux) if call.aux else None
    values = launch_arguments(call, spec, (a.q, a.k, a.v), outputs, vectors, num_sms)
    start(build(spec, gpu.arch), *values)
    return outputs


def _vector(value: Any, kind: str) -> Any:
    """A length vector or sink as the kernel reads it; conversions run where the tensor is."""
    if value is None:
        return None
    if is_torch(value):
        import torch

        return value.detach().to(getattr(torch, kind)).contiguous()
    return np.ascontiguousarray(value, kind)


def _allocate(a: Arguments, call: ForwardCall) -> tuple[Any, Any]:
    """O and LSE; filled where the kernel may leave rows unwritten: those of no sequence."""
    if call.is_empty:
        out, lse = _full(a.q, a.out_shape, 0.0), _full(a.q, a.lse_shape, -np.inf, "float32")
        if a.learnable_sink is not None:
            lse[...] = _vector(a.learnable_sink, "float32")[:, None]
        return out, lse
    padded = call.packed_q or call.used_q
    lse_shape = a.lse_shape if call.lse else (0,)
    return (
        _full(a.q, a.out_shape, 0.0 if padded else None),
        _full(a.q, lse_shape, -np.inf if padded else None, "float32"),
    )


def _full(template: Any, shape: tuple[int, ...], value: float | None, kind: str = "") -> Any:
    """A new tensor beside `template` and of its type (or `kind`); value None: uninitialised."""
    if is_torch(template):
        import torch

        dtype = getattr(torch, kind) if kind else template.dtype
        if value is None:
            return template.new_empty(shape, dtype=dtype)
        return template.new_full(shape, value, dtype=dtype)
    dtype = np.dtype(kind) if kind else template.dtype
    return np.empty(shape, dtype) if value is None else np.full(shape, value, dtype)


def to_arrays(arguments: Arguments) -> Arguments:
    """The same call on NumPy arrays, made of whatever has `__dlpack__` or `__array__`."""
    fields = ("q", "k", "v", "learnable_sink", *VECTORS)
    given = {name: getattr(arguments, name) for name in fields}
    arrays: dict[str, Any] = {name: to_numpy(name, x) for name, x in given.items() if x is not None}
    aux = [to_numpy("aux_tensors", x) for x in arguments.aux]
    return arguments._replace(**arrays, aux=aux)
