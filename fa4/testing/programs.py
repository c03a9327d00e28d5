"""A failing case as a short program, on NumPy arrays and on torch tensors.

Where inputs are normal numbers in a dense call, the program draws them itself, so that it can be
filed with a bug and run without fa4 once the function is imported; otherwise `build_inputs` does.
"""

from __future__ import annotations

import re

from fa4.testing.backends import is_loadable
from fa4.testing.case import Case

_ELEMENT = re.compile(r"^(\w+)\[([\d, ]+)\] = (\S+), oracle (\S+):")
_TYPES = {"fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16"}
_LITERALS = ("causal", "window_size", "softmax_scale", "softcap", "num_splits")
_SIZES = ("batch", "seqlen_q", "seqlen_k", "heads_k", "group", "head_dim", "head_dim_v")
_PLAIN = frozenset((*_LITERALS, *_SIZES, "sink", "dtype", "seed", "dlse"))
_AS_ARRAY = "{}.detach().cpu().double().numpy()"  # of a tensor
_GRADIENTS = ("dq", "dk", "dv", "dsink")


def is_plain(case: Case) -> bool:
    """Can a program make its inputs without fa4?"""
    plain = vars(Case())
    others = all(x == plain[name] for name, x in vars(case).items() if name not in _PLAIN)
    return others and case.dtype in _TYPES


def numpy_program(name: str, case: Case, what: str, error: str) -> str:
    """Source that calls the back end of this name and prints the element that is wrong.

    what: the output that is, or a kind of failure; error: as `Symptom.error` has it.
    """
    backend = f'"{name}"' if is_loadable(name) else "your_function"
    lines = ["import numpy as np", *["import ml_dtypes"] * (case.dtype == "bf16"), "",
             f"from fa4.testing import {'' if is_plain(case) else 'Case, build_inputs, '}"
             "load_backend", "", f"attention = load_backend({backend})"]  # fmt: skip
    if is_plain(case):
        kind = "ml_dtypes.bfloat16" if case.dtype == "bf16" else f"np.{_TYPES[case.dtype]}"
        lines += [*_drawn(case), f"q, k, v, dout = (x.astype({kind}) for x in (q, k, v, dout))",
                  f"options = {_options(case, 'np.array({}, np.float32)')}"]  # fmt: skip
    else:
        lines += [f"inputs = build_inputs({case!r})",
                  "q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout",
                  "options, dlse = inputs.options, inputs.dlse"]  # fmt: skip
    function = "varlen" if case.is_varlen else "function"
    results, more = ("out", "") if what == "out" else ("out, lse", "return_lse=True, ")
    lines.append(f"{results} = attention.{function}(q, k, v, {more}**options)")
    if what in _GRADIENTS:
        more = ", dlse=dlse" if case.dlse else ""
        lines.append(f"dq, dk, dv, *more = attention.backward(dout, q, k, v, out, lse{more}, "
                     "**options)")  # fmt: skip
        lines += ["(dsink,) = more"] * (what == "dsink")
    return "\n".join([*lines, *_shown(case, what, error, "np.asarray({})")]) + "\n"


def torch_program(name: str, case: Case, what: str, error: str) -> str:
    """The same on torch tensors, gradients by autograd; the function is imported by its name where
    that is one of a torch function."""
    device, imported = _torch_function(name)
    lines = ["import numpy as np", "import torch", *imported, ""]
    if is_plain(case):
        lines += [*_drawn(case), f'kind, device = torch.{_TYPES[case.dtype]}, "{device}"',
                  "q, k, v, dout = (torch.tensor(x).to(device, kind) for x in (q, k, v, dout))",
                  f"options = {_options(case, 'torch.tensor({}, device=device)')}"]  # fmt: skip
    else:
        lines += ["from fa4.testing import Case, build_inputs",
                  "from fa4.testing.torch_function import to_torch", "",
                  f'inputs, device = build_inputs({case!r}), "{device}"',
                  "arrays = inputs.q, inputs.k, inputs.v, inputs.dout",
                  "q, k, v, dout = (to_torch(x, device) for x in arrays)",
                  "options, dlse = inputs.options, inputs.dlse",
                  "for name, value in options.items():", "    if isinstance(value, np.ndarray):",
                  "        options[name] = to_torch(value, device)"]  # fmt: skip
    if what in _GRADIENTS:
        leaves = "q, k, v" if case.sink is None else 'q, k, v, options["learnable_sink"]'
        lines += [f"for x in ({leaves}):", "    x.requires_grad_()"]
    wanted = what == "lse" or case.dlse
    lines.append("out, lse = attention(q, k, v, return_lse=True, **options)" if wanted
                 else "out = attention(q, k, v, **options)")  # fmt: skip
    if what in _GRADIENTS:
        ends = "(out, lse), (dout, torch.tensor(dlse).to(lse))" if case.dlse else "out, dout"
        lines.append(f"torch.autograd.backward({ends})")
        of = {"dsink": 'options["learnable_sink"]'}.get(what, what[1:])
        lines.append(f"{what} = {of}.grad")
    return "\n".join([*lines, *_shown(case, what, error, _AS_ARRAY)]) + "\n"


def _torch_function(name: str) -> tuple[str, list[str]]:
    """Device and import lines."""
    found = re.fullmatch(r"torch:(?:(.+):)?([\w.]+):(\w+)", name)
    if found:
        device, module, function = found.groups()
        return device or "cpu", [f"from {module} import {function} as attention"]
    return "cpu", ["from your_module import attention  # on tensors (batch, seqlen, heads, "
                   "head_dim)"]  # fmt: skip


def _drawn(case: Case) -> list[str]:
    """q, k, v, dout and dlse in float64, as `fa4.testing.values` draws them."""
    shapes = [f"({rows}, {heads}, {dim})" for rows, heads, dim in (
        (case.seqlen_q, case.heads_q, case.head_dim), (case.seqlen_k, case.heads_k, case.head_dim),
        (case.seqlen_k, case.heads_k, case.head_dim_v), (case.seqlen_q, case.heads_q,
                                                         case.head_dim_v))]  # fmt: skip
    lines = [
        "q, k, v, dout, dlse = [], [], [], [], []",
        f"for batch in range({case.batch}):",
        f"    rng = np.random.default_rng([{case.seed}, batch])",
    ]
    lines += [
        f"    {x}.append(rng.standard_normal({shape}))"
        for x, shape in zip("qkv", shapes[:3], strict=True)
    ]
    lines += [
        f"    rng = np.random.default_rng([{case.seed}, batch, 1])",
        f"    dout.append(rng.standard_normal({shapes[3]}))",
        f"    dlse.append(rng.standard_normal(({case.heads_q}, {case.seqlen_q})).astype("
        "np.float32))",
        "q, k, v, dout, dlse = map(np.stack, (q, k, v, dout, dlse))",
    ]
    return lines


def _options(case: Case, array: str) -> str:
    """Source of the keywords of a plain case."""
    plain = Case()
    given = [
        f'"{name}": {getattr(case, name)!r}'
        for name in _LITERALS
        if getattr(case, name) != getattr(plain, name)
    ]
    if case.sink is not None:
        logits = [case.sink + 0.25 * head for head in range(case.heads_q)]
        given.append(f'"learnable_sink": {array.format(logits)}')
    return f"{{{', '.join(given)}}}"


def _shown(case: Case, what: str, error: str, array: str) -> list[str]:
    """The line that prints the wrong element beside the oracle's; of sequences, behind one that
    finds them in the packed, padded or paged result, read as `array` says."""
    found = _ELEMENT.match(error)
    if not found or found[1] != what:
        return [f"# {error.partition('; ')[0][:90]}"]
    index, lines = found[2], []
    if case.is_varlen and what != "dsink":
        split = {"lse": "split_lse", "dk": "split_keys", "dv": "split_keys"}.get(what, "split_rows")
        lines = [f"{what} = inputs.{split}({array.format(what)})"]
        batch, _, index = index.partition(", ")
        index = f"{batch}][{index}"
    shown = f'print("{what}[{found[2]}] is", float({what}[{index}]), "and must be {found[4]}")'
    return [*lines, shown]
