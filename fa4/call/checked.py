"""From the public functions' arguments to a checked `Call`.

Tensors stay as they come, in their own framework and uncopied. Everything that can be seen without
reading them is checked (`fa4.call.form`), once for all calls of a form; what lies in them (offsets,
lengths, pages) `fa4.backends.request` checks, for those on the CPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from fa4.call.arrays import as_bool, as_float, as_int, to_numpy
from fa4.call.call import INPUTS, Call, Extras
from fa4.call.form import with_form
from fa4.call.options import COUNT, COUNT_OR_NONE, FLAG, NUMBER, OPTIONS
from fa4.config import BackwardConfig, ForwardConfig, normalize_window, require_int

DENSE_DEFAULTS = {option.name: option.default for option in OPTIONS if not option.varlen}
VARLEN_DEFAULTS = {option.name: option.default for option in OPTIONS}


def _optional_int(name: str, value: Any) -> int | None:
    return None if value is None else as_int(name, value)


# What reads an option whose value is the field of its name.
_READ = {NUMBER: as_float, COUNT: as_int, COUNT_OR_NONE: _optional_int, FLAG: as_bool}
_NUMBERS = tuple(
    (x.name, _READ[x.kind]) for x in OPTIONS if x.kind in _READ and x.carried_by == (x.name,)
)
_SPARSE = INPUTS[-4:]  # the lists of block_sparse_tensors
_OPTIONAL = INPUTS[3:-4]
_NO_LISTS = [None] * len(_SPARSE)
_NO_EXTRAS = Extras()
_new: Any = Call  # for tensors by position, which are as many as INPUTS
_MOST_KNOWN = 4096
_known: dict[Any, tuple[Any, ...]] = {}  # as written -> the fields after the optional tensors


def make_call(q: Any, k: Any, v: Any, options: Mapping[str, Any], *, varlen: bool) -> Call:
    """The call of these tensors and options (names as in `VARLEN_DEFAULTS`; some may be missing).

    Raises TypeError and ValueError with one line that names the argument, the value and what is
    allowed.
    """
    written = _as_written((q, k, v), options, varlen)
    try:
        known = _known.get(written)
    except TypeError:  # a list, a callable without a hash, a size that is a symbol
        written = known = None
    if known is not None:
        optional = [options.get(name) for name in _OPTIONAL]
        return Call._make([q, k, v, *optional, *known])
    call = _make_new(q, k, v, options, varlen)
    if written and call.form and not (call.sparse_block or call.aux_tensors):
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[written] = call[len(_OPTIONAL) + 3 :]
    return call


def _as_written(tensors: Any, options: Mapping[str, Any], varlen: bool) -> Any:
    """What two calls in torch share that give the same `Call` but for tensors; None if traced."""
    torch = sys.modules.get("torch")
    if torch is None or torch.compiler.is_compiling():
        return None
    tensor: Any = torch.Tensor
    if not isinstance(tensors[0], tensor):
        return None
    try:
        q, k, v = tensors
        # A tensor in place of a number is read in every call: a list has no hash.
        values = [
            ((x.shape, x.dtype, x.stride(), x.device) if name in _OPTIONAL else [])
            if isinstance(x, tensor)
            else x
            for name, x in options.items()
        ]
        return (
            q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.stride(), k.stride(),
            v.stride(), q.device, k.device, v.device, varlen, *options, *values,
            *map(type, values),  # 1 is not True
        )  # fmt: skip
    except (TypeError, AttributeError):  # what is no tensor
        return None


def _make_new(q: Any, k: Any, v: Any, options: Mapping[str, Any], varlen: bool) -> Call:
    given = {**VARLEN_DEFAULTS, **options}
    alien = not varlen and any(name not in DENSE_DEFAULTS for name in options)
    if alien or len(given) > len(VARLEN_DEFAULTS):
        allowed = VARLEN_DEFAULTS if varlen else DENSE_DEFAULTS
        unknown = min(set(options) - set(allowed))
        raise TypeError(f"unknown option {unknown!r}; allowed are {', '.join(allowed)}")
    tensors, aux = _gather(q, k, v, given)
    left, right = normalize_window(given["window_size"], as_bool("causal", given["causal"]))
    call: Call = _new(
        *tensors,
        aux_tensors=aux,
        sparse_block=_block_size(given["block_sparse_tensors"]),
        softmax_scale=_read_scale(given["softmax_scale"], tensors[0]),
        window_left=left,
        window_right=right,
        pack_gqa=given["pack_gqa"],
        varlen=varlen,
        extras=_read_extras(given),
        **{name: read(name, given[name]) for name, read in _NUMBERS},
    )
    torch = sys.modules.get("torch")
    if torch is not None and torch.compiler.is_compiling():
        return call  # sizes may be symbols: the operator looks at them when it runs
    return with_form(call)


def _gather(q: Any, k: Any, v: Any, given: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """All tensors in the order of INPUTS, and the auxiliary ones: of torch, or NumPy arrays."""
    tensors = [q, k, v, *[given[name] for name in _OPTIONAL]]
    sparse = given["block_sparse_tensors"]
    tensors += _NO_LISTS if sparse is None else _sparse_lists(sparse)
    aux = given["aux_tensors"]
    if aux is None:
        aux = []
    elif not isinstance(aux, (list, tuple)):
        raise TypeError(f"aux_tensors must be a list of tensors; got {type(aux).__name__}")
    torch = sys.modules.get("torch")
    torch_tensor: Any = () if torch is None else torch.Tensor
    in_torch = isinstance(q, torch_tensor)
    for place, value in enumerate((*tensors, *aux)):
        if value is not None and isinstance(value, torch_tensor) != in_torch:
            name = INPUTS[place] if place < len(INPUTS) else "aux_tensors"
            kind = "a torch tensor" if in_torch else "no torch tensor"
            raise TypeError(f"{name} must be {kind}, as q is; got {type(value).__name__}")
    if in_torch:
        return tensors, list(aux)
    named = zip(INPUTS, tensors, strict=True)
    arrays = [x if x is None else to_numpy(name, x) for name, x in named]
    return arrays, [to_numpy("aux_tensors", x) for x in aux]


def _sparse_lists(sparse: Any) -> list[Any]:
    """The lists of any object with the fields of `fa4.reference.BlockSparseTensors`."""
    lists = {name: getattr(sparse, name, None) for name in _SPARSE}
    if lists["mask_block_cnt"] is None or lists["mask_block_idx"] is None:
        raise ValueError("block_sparse_tensors needs mask_block_cnt and mask_block_idx; got None")
    if (lists["full_block_cnt"] is None) != (lists["full_block_idx"] is None):
        raise ValueError("full_block_cnt and full_block_idx go together; got one of them")
    return list(lists.values())


def _block_size(sparse: Any) -> list[int]:
    if sparse is None:
        return []
    given = getattr(sparse, "block_size", None)
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise ValueError(f"block_size must be (rows, columns); got {given!r}")
    rows, columns = given
    size = {"block_size rows": rows, "block_size columns": columns}
    size = {name: as_int(name, n) for name, n in size.items()}
    for name, n in size.items():
        require_int(name, n, 1)
    return list(size.values())


def _read_scale(scale: Any, q: Any) -> float:
    """The given one, or 1 / sqrt(d). Without a d, which is refused later, any."""
    if scale is not None:
        return as_float("softmax_scale", scale)
    dim = q.shape[-1] if len(q.shape) else 0
    return 1.0 / math.sqrt(dim) if dim else 1.0


def _read_extras(given: Mapping[str, Any]) -> Extras:
    """The callables and configs. `config` may be one config, or a pair."""
    functions = given["score_mod"], given["score_mod_bwd"], given["mask_mod"]
    config = given["config"]
    if config is None and functions == (None, None, None):
        return _NO_EXTRAS
    for name, function in zip(Extras._fields, functions, strict=False):
        if function is not None and not callable(function):
            raise TypeError(f"{name} must be callable; got {function!r}")
    forward = backward = None
    for part in config if isinstance(config, tuple) else (config,):
        if isinstance(part, ForwardConfig):
            forward = part
        elif isinstance(part, BackwardConfig):
            backward = part
        elif part is not None:
            raise TypeError(f"config must be a ForwardConfig or BackwardConfig; got {part!r}")
    return Extras(*functions, forward, backward)
