"""The key of a kernel: different for specs that differ, the same wherever it is made."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fa4.compiled import identity
from fa4.compiled.identity import NotHashable, describe, encode, kernel_key, spec_text
from fa4.compiled.toolchain import Toolchain
from fa4.config import Exp2Split, ForwardConfig
from fa4.hardware import B200, B300, Source
from fa4.masks import Band, Chunked
from fa4.sm100.backward.spec import BackwardSpec
from fa4.sm100.forward.spec import ForwardSpec

ROOT = Path(__file__).resolve().parents[2]
STANDIN = Path(__file__).with_name("standin.py")
TOOLCHAIN = Toolchain("4.8.1", "cu12", "f" * 64, Path("compiler.so"), Path("runtime.so"))

SPLITS = st.builds(
    Exp2Split,
    frequency=st.just(0) | st.integers(8, 32),
    residue=st.integers(0, 8),
    start_fragment=st.integers(0, 3),
    degree=st.integers(1, 5),
)
NUMERICS = st.builds(
    ForwardConfig,
    tile_m=st.sampled_from([64, 128]),
    tile_n=st.sampled_from([64, 128]),
    q_tiles=st.integers(1, 2),
    rescale_threshold_log2=st.sampled_from([0, 0.0, -0.0, 4.5, 8, 8.0]),
    rescale_rows=st.sampled_from([1, 32]),
    p_offset_log2=st.sampled_from([0.0, 8.0]),
    exp2=SPLITS,
    num_splits=st.integers(1, 3),
)
FLAGS = ("window_left", "lse", "packed_q", "packed_k", "used_q", "used_k", "sink", "softcap")


def plain(value):
    return value


def other(value):
    return value + 1


FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "head_dim": st.sampled_from([64, 128]),
    "head_dim_v": st.sampled_from([64, 128]),
    "dtype": st.sampled_from(["bf16", "fp16"]),
    "causal": st.booleans(),
    "window_right": st.just(False),
    "group": st.sampled_from([1, 2, 4]),
    "score_mod": st.sampled_from([None, plain, other]),
    "mask_mod": st.sampled_from([None, plain, other]),
    "mask": st.sampled_from([None, None, Chunked(8), Chunked(9), Band(8, 0)]),
    "aux": st.sampled_from([(), (("fp32", 1),), (("int32", 1), ("fp32", 2))]),
    "cta_group": st.integers(1, 2),
    "scheduler": st.sampled_from(["static", "lpt"]),
    "numerics": NUMERICS,
    "gpu": st.sampled_from([B200, B300]),
    **{name: st.booleans() for name in FLAGS},
}


def valid(fields: dict[str, Any]) -> bool:
    """Do the features not exclude one another?"""
    window = fields["causal"] or fields["window_left"]
    masks = sum(map(bool, (window, fields["mask"], fields["mask_mod"])))
    return masks <= 1 and not (fields["softcap"] and fields["score_mod"] is not None)


SPECS = st.fixed_dictionaries(FIELDS).filter(valid).map(lambda fields: ForwardSpec(**fields))


def key(spec: ForwardSpec, arch: str = "sm_100a", toolchain: Toolchain = TOOLCHAIN) -> str:
    return kernel_key(spec, arch, toolchain, "compiler")


def test_the_strategies_know_every_field() -> None:
    """A new field of ForwardSpec must be drawn here too."""
    assert set(FIELDS) == {field.name for field in dataclasses.fields(ForwardSpec)}


@given(SPECS, SPECS)
@settings(max_examples=60)
def test_keys_are_equal_exactly_for_equal_specs(one: ForwardSpec, two: ForwardSpec) -> None:
    assert (key(one) == key(two)) == (one == two)
    assert key(one) == key(dataclasses.replace(one))


BACKWARD_CHANGES: dict[str, Any] = {
    "head_dim": 128, "head_dim_v": 128, "dtype": "fp16", "causal": True, "window_left": True,
    "window_right": True, "packed_q": True, "packed_k": True, "used_q": True, "used_k": True,
    "sink": True, "lse_gradient": True, "out_residual": True, "softcap": True, "score_mod": other,
    "score_mod_bwd": other, "mask_mod": plain, "mask": Chunked(8), "aux": (("fp32", 1),),
    "deterministic": True, "cta_group": 2, "gpu": B300,
}  # fmt: skip


def test_every_field_of_a_backward_spec_is_in_the_key() -> None:
    """And the kind of kernels."""
    spec = BackwardSpec(head_dim=64, head_dim_v=64)
    assert {field.name for field in dataclasses.fields(spec)} == BACKWARD_CHANGES.keys()
    mods = {"score_mod": plain, "score_mod_bwd": plain}
    keys = {key(spec), key(ForwardSpec(head_dim=64, head_dim_v=64))}
    keys.add(key(dataclasses.replace(spec, **mods)))
    for name, value in BACKWARD_CHANGES.items():
        around = mods if name.startswith("score_mod") else {}
        keys.add(key(dataclasses.replace(spec, **around | {name: value})))
    assert len(keys) == 3 + len(BACKWARD_CHANGES)


def test_numbers_that_are_equal_make_equal_keys() -> None:
    """The dataclasses compare by value, so True is 1 and 8 is 8.0."""

    def spec(causal: Any, threshold: float) -> ForwardSpec:
        numerics = ForwardConfig(rescale_threshold_log2=threshold)
        return ForwardSpec(head_dim=64, head_dim_v=64, causal=causal, numerics=numerics)

    assert spec(True, 8) == spec(1, 8.0) and key(spec(True, 8)) == key(spec(1, 8.0))
    assert key(spec(False, 0.0)) == key(spec(0, -0.0)) != key(spec(False, 0.5))


@given(SPECS, st.data())
@settings(max_examples=120)
def test_any_single_field_changes_the_key(spec: ForwardSpec, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([name for name in FIELDS if name != "window_right"]))
    value = data.draw(FIELDS[name].filter(lambda value: value != getattr(spec, name)))
    fields = {field: getattr(spec, field) for field in FIELDS} | {name: value}
    assume(valid(fields))
    assert key(ForwardSpec(**fields)) != key(spec)


def test_every_field_of_the_machine_changes_the_key() -> None:
    """And none of its sources, which are text for people."""
    spec = ForwardSpec(head_dim=64, head_dim_v=64)
    changed_values = {
        "name": "another",
        "arch": "sm_103a",
        "sources": dict.fromkeys(B200.sources, Source("x")),
    }
    for field in dataclasses.fields(B200):
        value = getattr(B200, field.name)
        new = changed_values[field.name] if field.name in changed_values else value + 1
        gpu = dataclasses.replace(B200, **{field.name: new})
        changed = key(dataclasses.replace(spec, gpu=gpu)) != key(spec)
        assert changed == (field.name != "sources"), field.name


def test_what_compiles_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiler version, flavour and build, architecture, sources, CuTe-DSL's variables."""
    spec = ForwardSpec(head_dim=64, head_dim_v=64)
    keys = {key(spec), key(spec, "sm_103a"), kernel_key(spec, "sm_100a", TOOLCHAIN, "another")}
    for change in ({"version": "4.9"}, {"flavour": "cu13"}, {"fingerprint": "0" * 64}):
        keys.add(key(spec, toolchain=dataclasses.replace(TOOLCHAIN, **change)))
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    keys.add(key(spec))
    monkeypatch.setattr(identity, "source_hash", lambda: "other sources")
    keys.add(key(spec))
    monkeypatch.setattr(sys, "version_info", (3, 99, 0, "final", 0))
    keys.add(key(spec))
    assert len(keys) == 9
    monkeypatch.undo()
    monkeypatch.setenv("CUTE_DSL_KEEP", "ptx")
    assert key(spec) in keys


def test_a_changed_source_file_changes_the_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("kit", "sm90", "sm100/forward", "compiled", "masks", "plan"):
        (tmp_path / name).mkdir(parents=True)
    files = [
        "config.py",
        "hardware.py",
        "plan/a.py",
        "kit/g.py",
        "sm90/f.py",
        "sm100/forward/b.py",
        "compiled/d.py",
        "masks/e.py",
    ]
    for name in files:
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(identity, "ROOT", tmp_path)
    make = identity.source_hash.__wrapped__
    hashes = [make()]
    for name in files:
        (tmp_path / name).write_text("x = 2\n")
        hashes.append(make())
    (tmp_path / "plan/a.py").rename(tmp_path / "plan/c.py")
    hashes.append(make())
    assert len(set(hashes)) == len(hashes)


def module(text: str, name: str = "user_mods") -> dict[str, Any]:
    """The names that a user's module of this text defines."""
    made = types.ModuleType(name)
    exec(compile(textwrap.dedent(text), f"<{name}>", "exec"), vars(made))
    return vars(made)


MODS = """
import math
LIMIT = 8
TABLE = {"a": (1, 2), "b": {3, 4}}
def helper(value):
    return min(value, LIMIT)
def mod(value, scale=2, *, shift=0):
    return helper(value) * scale + shift + math.pi
def make(slope):
    def biased(value):
        return value * slope
    return biased
def lookup(value):
    return value + TABLE["a"][0]
def count(value):
    return value if value < 1 else count(value - 1)
def nested(value):
    return [LIMIT + x for x in (value, value)]
"""


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("mod", "scale=2", "scale=3"),
        ("mod", "shift=0", "shift=1"),
        ("mod", "math.pi", "math.e"),
        ("mod", "+ shift", "- shift"),
        ("mod", "LIMIT = 8", "LIMIT = 9"),
        ("mod", "min(", "max("),
        ("lookup", "(1, 2)", "(1, 5)"),
        ("lookup", "{3, 4}", "{3, 5}"),
        ("count", "value < 1", "value < 2"),
        ("nested", "LIMIT = 8", "LIMIT = 9"),
    ],
)
def test_what_a_callable_means_changes_its_key(name: str, before: str, after: str) -> None:
    """Its own text, defaults, helpers and the globals that any of them name."""
    assert before in MODS
    one, two = module(MODS), module(MODS.replace(before, after))
    assert encode(one[name]) != encode(two[name])
    assert encode(one[name]) == encode(module(MODS)[name])


def test_what_a_callable_does_not_use_leaves_its_key() -> None:
    one, two = module(MODS), module(MODS.replace("LIMIT = 8", "LIMIT = 9"))
    assert encode(one["lookup"]) == encode(two["lookup"])


def test_closures_attributes_and_partials() -> None:
    names = module(MODS)
    make, mod = names["make"], names["mod"]
    assert encode(make(1)) == encode(make(1.0)) != encode(make(2))
    partials = [functools.partial(mod, scale=scale) for scale in (1, 1, 2)]
    assert encode(partials[0]) == encode(partials[1]) != encode(partials[2])
    before = encode(mod)
    mod.__vec_size__ = 2
    assert encode(mod) != before


def test_two_lambdas_on_one_line() -> None:
    """They have the same source text."""
    one, two = (lambda x: x + 1), (lambda x: x + 2)
    assert encode(one) != encode(two)


def test_names_behind_a_users_module() -> None:
    """`mods.SLOPE` counts as SLOPE would, `mods.inner.X` too; other names of the module do not."""
    inner = types.ModuleType("inner_mods")
    inner.X = 1
    mods = types.ModuleType("outer_mods")
    mods.SLOPE, mods.UNUSED, mods.inner = 1, 1, inner
    use = module("def use(value):\n    return value * mods.SLOPE + mods.inner.X")
    use["mods"] = mods
    keys = [encode(use["use"])]
    mods.UNUSED = 2
    assert encode(use["use"]) == keys[0]
    mods.SLOPE = 2
    keys.append(encode(use["use"]))
    inner.X = 2
    keys.append(encode(use["use"]))
    assert len({repr(key) for key in keys}) == 3


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("box = object()\ndef f(x): return box", "builtins.object"),
        ("import threading\nlock = threading.Lock()\ndef f(x): return lock", "lock"),
        ("def f(x): return getattr(x, 'y')", "getattr"),
        ("def f(x): return globals()['LIMIT']", "globals"),
        ("def f(x):\n    import numpy\n    return numpy.pi", "imports numpy"),
        ("import numpy\ndef f(x): return numpy.exp(x)", "exp"),
        ("class C:\n    def f(self, x): return x\nf = C().f", "method"),
        ("class F:\n    def __call__(self, x): return x\nf = F()", "user_mods.F"),
        ("loop = []\nloop.append(loop)\ndef f(x): return loop", "contains itself"),
        (
            "def g():\n    def f(x): return later\n    if 0: later = 1\n    return f\nf = g()",
            "later",
        ),
    ],
)
def test_what_cannot_be_hashed_is_refused(text: str, why: str) -> None:
    names = {"__name__": "user_mods"}
    exec(text, names)
    with pytest.raises(NotHashable, match=why):
        encode(names["f"])


def test_jit_functions_keep_their_key_when_they_are_compiled() -> None:
    """Compilation replaces the code of a `@cute.jit` function by a rewritten one."""
    pytest.importorskip("cutlass")
    pytest.importorskip("tvm_ffi")
    source = importlib.util.spec_from_file_location("fresh_standin", STANDIN)
    assert source is not None and source.loader is not None
    standin = importlib.util.module_from_spec(source)
    source.loader.exec_module(standin)
    spec = ForwardSpec(head_dim=64, head_dim_v=64, score_mod=standin.clamp)
    before, code = key(spec), standin.clamp.__wrapped__.__code__
    standin.compile_scale(spec, "sm_100a")
    assert standin.clamp.__wrapped__.__code__ is not code
    assert key(spec) == before


def test_keys_are_the_same_in_every_process() -> None:
    """Whatever the hash seed, for callables and sets too."""
    program = textwrap.dedent(
        """
        import json
        from pathlib import Path
        from tests.sm100 import test_cache_key as tests
        tests.identity.source_hash = lambda: "pinned"
        names = tests.module(tests.MODS)
        specs = [
            tests.ForwardSpec(head_dim=64, head_dim_v=64),
            tests.ForwardSpec(head_dim=64, head_dim_v=64, score_mod=names["lookup"]),
            tests.ForwardSpec(head_dim=64, head_dim_v=64, mask_mod=names["make"]({"a", "b", "c"})),
            tests.ForwardSpec(head_dim=64, head_dim_v=64, mask_mod=tests.plain),
        ]
        print(json.dumps([tests.key(spec) for spec in specs]))
        """
    )
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True, text=True, cwd=ROOT, env=environment, check=True,
        )  # fmt: skip
        found.append(json.loads(done.stdout))
    assert found[0] == found[1] and len(set(found[0])) == 4


def test_descriptions_name_what_differs_from_the_defaults() -> None:
    numerics = ForwardConfig(exp2=Exp2Split(frequency=16))
    spec = ForwardSpec(head_dim=64, head_dim_v=64, causal=True, lse=False, score_mod=plain,
                       numerics=numerics, gpu=B300)  # fmt: skip
    assert spec_text(describe(spec)) == (
        "head_dim=64 head_dim_v=64 causal score_mod=plain lse=False "
        "numerics.exp2.frequency=16 gpu=sm_103a"
    )


def test_host_code_is_not_compiled_before_it_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuTe-DSL would, where the machine's GPU runs what is compiled; export compiles it anyhow."""
    pytest.importorskip("cutlass")
    from cutlass.cutlass_dsl.cutlass import CutlassBaseDSL

    from fa4.compiled.forward import compile_forward

    monkeypatch.setattr(CutlassBaseDSL, "_runtime_can_run_compiled", lambda *_: True)
    compiled = compile_forward(ForwardSpec(head_dim=64, head_dim_v=64))
    assert compiled.engine is None and compiled.artifacts.CUBIN
