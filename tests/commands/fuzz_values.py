"""What the fuzzer gives to options and arguments: values that make sense, and hostile ones.

Files lie in one folder, `make_files`; what a command writes goes to its own empty folder.
"""

from __future__ import annotations

import io
import json
import os
import random
import zipfile
from pathlib import Path

import numpy as np

from fa4.figures.accuracy import B200_FILE
from fa4.sim.fields import FIELDS, parse_count, parse_flag, parse_number, parse_window

PTX = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry add(.param .u64 x, .param .u64 y, .param .u32 n)
{
  .reg .b32 %r<4>; .reg .b64 %rd<5>; .reg .f32 %f<3>; .reg .pred %p;
  ld.param.u64 %rd1, [x]; ld.param.u64 %rd2, [y]; ld.param.u32 %r1, [n];
  mov.u32 %r2, %tid.x; setp.ge.u32 %p, %r2, %r1; @%p bra end;
  mul.wide.u32 %rd3, %r2, 4; add.s64 %rd4, %rd1, %rd3; ld.global.f32 %f1, [%rd4];
  add.f32 %f2, %f1, %f1; add.s64 %rd4, %rd2, %rd3; st.global.f32 [%rd4], %f2;
end: ret;
}
"""
# As `fa4 bench --json` writes it.
BENCH = {
    "schema_version": 1, "device": "NVIDIA H200", "impl": "sm90", "dtype": "bf16",
    "pass": "forward pass", "figure": None,
    "rows": [
        {"problem": {"batch": 1, "seqlen_q": rows, "seqlen_k": rows, "heads_q": 2, "heads_k": 2,
                     "head_dim": 64, "head_dim_v": 64, "dtype": "bf16", "causal": rows < 1024,
                     "window_size": [None, 0 if rows < 1024 else None]},
         "tflops": {"fa4": 100.0, "cudnn": 90.0}, "predicted_tflops": 120.0,
         "ratio": {"cudnn": 1.11}, "missing": {"flash": "it is not here"}}
        for rows in (512, 2048)
    ],
}  # fmt: skip
MACHINE = 'base = "b200"\n[gpu]\nsm_count = 10\n'

# Values that mean nothing anywhere, or mean something only to what was not written with care. None
# is a path outside of the fuzzer's folders: a command that does not look would replace what is
# there. Devices are reached by links (`make_files`, `make_places`), of which the link is replaced.
HOSTILE = (
    "", " ", "0", "1", "2", "-1", "-0.0", "0.5", "1e3", "1e9", "1e308", "1e-320", "1e999", "nan",
    "inf", "-inf", "99999999999999999999", "-99999999999999999999", "9" * 5000, "0" * 400, "0x10",
    "1_000", "\N{ARABIC-INDIC DIGIT THREE}", "\N{VULGAR FRACTION ONE HALF}",
    "\N{COLLISION SYMBOL}", "\N{RIGHT-TO-LEFT OVERRIDE}x", "\udcff", "\udcff.npz", "a" * 5000,
    ",", ",,,", "=", "x=", "=x", "a=b=c", "1,2,3,4,5", "1:2:3", "none", "null", "true", "None",
    "--help", "--", "-", "%s", "{0}", "[red]", "a\nb", "\t", "..", ".", "zero.txt", "full.txt",
    "1k", "1m", "9223372036854775807", "2147483648", "4294967295", "torch-sdpa:", "json:loads",
    "reference", "fwd", "b200 ", "B200", "tau=0",
)  # fmt: skip

# By the option's name without its dashes.
PLAUSIBLE = {
    "pass": ("fwd", "bwd", "forward", "backward"),
    "machine": ("b200", "b300", "h100", "h200"),
    "dtype": ("bf16", "fp16", "fp32", "fp64", "e4m3"),
    "set": ("tau=0", "head_dim=64", "gpu.sm_count=20", "costs.launch_ns=0", "seqlen=1k",
            "seqlen=1k,2k", "kv_stages=2:4:1", "causal=yes,no", "clock_ghz=1", "window=128,0"),
    "compare": ("tau=0", "cta_group=1 tau=1", "gpu.exp_per_clk=32", "machine=b300"),
    "csv": ("rows.csv", "new/rows.csv"),
    "resume": ("search.jsonl", "new/search.jsonl"),
    "jobs": ("1", "2"),
    "tiles": ("1", "2", "3"),
    "kv-tiles": ("1", "4", "0"),
    "figure": ("f.png", "f.svg"),
    "trace": ("t.json",),
    "output": ("my.toml",),
    "toml": ("b200", "h100"),
    "name": ("b200", "h200"),
    "names": ("smem", "exp2", "roofline"),
    "format": ("png", "svg"),
    "arch": ("sm_100a", "sm_103a"),
    "flavour": ("cu12", "cu13"),
    "window": ("left", "right", "both", "3,5", "none,0", "100,-2"),
    "scheduler": ("static", "lpt", "clc", "spt"),
    "constants": ("sync_cycles", "vector_efficiency,sync_cycles"),
    "software": ("FA4", "cuDNN"),
    "max-mape": ("0", "5"),
    "max-error": ("1", "100"),
    "evaluations": ("1", "3"),
    "max-examples": ("1", "2"),
    "property": ("plain", "causal", "gradients"),
    "backend": ("reference", "oracle", "torch-sdpa"),
    "chunks": ("1", "2"),
    "random": ("1,1,8,16", "2,2,5,8", "1,2,130,64", "1,1,0,8"),
    "keys": ("1", "7", "200"),
    "heads-k": ("0", "1", "2"),
    "impl": ("auto", "reference", "oracle", "sm100", "sm90", "emulator", "emulator_sm90"),
    "schedule": ("fifo", "random", "adversarial"),
    "scale": ("0", "1", "-1", "0.125"),
    "softcap": ("0", "20"),
    "minutes": ("1", "0.5"),
    "layer": ("a", "b"),
    "seqlen": ("1", "64", "100"),
    "heads": ("1", "2", "3"),
    "sram-kib": ("1", "6", "64", "192"),
    "off-rescale-rate": ("0", "0.5", "1"),
    "emulated-frequency": ("0", "10", "16"),
    "older-than": ("1s", "3d", "1.5h"),
    "pattern": ("causal", "a", "sm_100a"),
    "kernel": ("add", "forward", "blackwell", "hopper", "published", "fa2"),
    "grid": ("1", "2,1,1"),
    "block": ("32", "64,1,1"),
    "cluster": ("1", "2,1,1"),
    "smem": ("0", "1024"),
    "arg": ("f32[64]=random", "y:f32[64]=zeros", "u32=32", "x:f32[64]=ones"),
    "max-findings": ("1", "5"),
    "seeds": ("1", "2"),
    "group": ("1", "2", "8"),
    "head-dims": ("64", "128,192:128"),
    "seqlens": ("1k", "8k,32k"),
    "masks": ("full", "causal", "full,causal"),
    "backends": ("fa4", "cudnn,flash"),
    "repeats": ("1", "2"),
    "max-steps": ("1000",),
    "timeout": ("5",),
}  # fmt: skip
INPUTS = {
    "file": ("in.npz", "in.safetensors", "layers.npz", "add.ptx"),
    "input": ("in.npz", "in.safetensors", "layers.npz"),
    "text": ("text.txt",),
    "measurements": ("good.csv",),
    "lengths": ("lengths.txt",),
    "machine": ("my.toml",),
    "from": ("bench.json",),
}


def make_files(folder: Path) -> None:
    """Good files, and empty, cut, wrong, huge, special and oddly named ones of every kind."""
    rng = np.random.default_rng(0)
    layer = {name: rng.standard_normal((1, 9, 2, 8)) for name in "qkv"}
    np.savez(folder / "in.npz", **layer)
    np.savez(folder / "layers.npz", **{f"{x}.{n}": layer[n] for x in "ab" for n in "qkv"})
    from safetensors.numpy import save_file

    save_file({name: x.astype(np.float32) for name, x in layer.items()}, folder / "in.safetensors")
    good = {"add.ptx": PTX, "my.toml": MACHINE, "lengths.txt": "10 20\n30\n",
            "text.txt": "Attention is weighed. " * 20,
            "good.csv": measurements(), "bench.json": json.dumps(BENCH)}  # fmt: skip
    for name, text in good.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in [*good, "in.npz", "in.safetensors"]:
        content, (stem, kind) = (folder / name).read_bytes(), name.rsplit(".", 1)
        (folder / f"empty-{stem}.{kind}").write_bytes(b"")
        (folder / f"cut-{stem}.{kind}").write_bytes(content[: len(content) // 2])
        (folder / f"noise-{stem}.{kind}").write_bytes(rng.bytes(500))
        (folder / f"zeros-{stem}.{kind}").write_bytes(bytes(500))
        (folder / f"folder-{stem}.{kind}").mkdir()
        os.mkfifo(folder / f"pipe-{stem}.{kind}")
        (folder / f"full-{stem}.{kind}").symlink_to("/dev/full")
        (folder / f"loop-{stem}.{kind}").symlink_to(folder / f"loop-{stem}.{kind}")
        with (folder / f"huge-{stem}.{kind}").open("wb") as file:
            file.write(content)
            file.truncate(2**41)
        (folder / f"\N{COLLISION SYMBOL} {stem}.{kind}").write_bytes(content)
    write_strange_arrays(folder, layer)
    write_strange_texts(folder)
    write_strange_reports(folder)


def measurements(rows: int = 7) -> str:
    """The first published measurements: the fewest that its constants can be fitted to."""
    lines = B200_FILE.read_text("utf-8").splitlines(keepends=True)
    return "".join(lines[: rows + 1])


def write_strange_arrays(folder: Path, layer: dict[str, np.ndarray]) -> None:
    """Arrays of other types, shapes and values than attention takes, and lying headers."""
    strange = {
        "ints": {name: x.astype(np.int64) for name, x in layer.items()},
        "objects": {name: np.array([{}, None], dtype=object) for name in layer},
        "words": {name: np.array(["a", "b"]) for name in layer},
        "complex": {name: x.astype(np.complex128) for name, x in layer.items()},
        "nan": {name: x * np.nan for name, x in layer.items()},
        "large": {name: x * 1e300 for name, x in layer.items()},
        "lengths": layer | {"k": layer["k"][:, :3]},
        "heads": layer | {"q": np.repeat(layer["q"], 3, axis=2)[:, :, :5]},
        "dims": layer | {"q": layer["q"][..., :3]},
        "flat": {name: x.ravel() for name, x in layer.items()},
        "none": {name: x[:, :0] for name, x in layer.items()},
        "scalar": {name: np.float32(1) for name in layer},
        "half": {"q": layer["q"]},
        "other": {"x": layer["q"]},
    }
    for name, arrays in strange.items():
        np.savez(folder / f"strange-{name}.npz", **arrays)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1000000, 1000000, 9, 9), }"
    lying = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name in layer:
            archive.writestr(f"{name}.npy", lying)
    (folder / "strange-lying.npz").write_bytes(content.getvalue())
    (folder / "strange-lying.safetensors").write_bytes(b"\xff" * 8 + b"{}")
    length = len(b'{"q":{"dtype":"F4","shape":[-1],"data_offsets":[9,0]}}')
    (folder / "strange-header.safetensors").write_bytes(
        length.to_bytes(8, "little") + b'{"q":{"dtype":"F4","shape":[-1],"data_offsets":[9,0]}}'
    )


def write_strange_reports(folder: Path) -> None:
    """Reports of `fa4 bench` in which one value is what it never writes."""
    strange = {
        "negative": ("tflops", {"fa4": -1.0}), "none": ("tflops", {"fa4": None}),
        "nan": ("tflops", {"fa4": float("nan")}), "text": ("tflops", {"fa4": "1"}),
        "empty": ("tflops", {}), "other": ("tflops", {"mine": 1.0}),
        "null": ("predicted_tflops", None), "zero": ("predicted_tflops", 0),
        "missing": ("missing", None), "problem": ("problem", {"batch": 0}),
    }  # fmt: skip
    for name, (key, value) in strange.items():
        report = json.loads(json.dumps(BENCH))
        report["rows"][0][key] = value
        (folder / f"strange-{name}.json").write_text(json.dumps(report), encoding="utf-8")
    for name, rows in {"rows": [], "flat": [1], "deep": "[" * 9000}.items():
        text = rows if isinstance(rows, str) else json.dumps({**BENCH, "rows": rows})
        (folder / f"strange-{name}.json").write_text(text, encoding="utf-8")


def write_strange_texts(folder: Path) -> None:
    """TOML, CSV, lengths and PTX that can be read, and say something absurd."""
    csv_lines = measurements().splitlines()
    texts = {
        "clock.toml": 'base = "b200"\n[gpu]\nclock_hz = 1e300\n',
        "count.toml": f'base = "b200"\n[gpu]\nsm_count = {10**400}\n',
        "negative.toml": 'base = "b200"\n[gpu]\nsm_count = -1\n',
        "zero.toml": 'base = "b200"\n[costs]\nlaunch_ns = 0.0\ncta_start_cycles = 0.0\n',
        "nan.toml": 'base = "b200"\n[costs]\nlaunch_ns = nan\n',
        "base.toml": "base = 3\n",
        "date.toml": 'base = "b200"\n[gpu]\nsm_count = 1979-05-27\n',
        "twice.toml": 'base = "b200"\nbase = "b200"\n',
        "deep.toml": "x = " + "[" * 5000 + "]" * 5000 + "\n",
        "name.toml": 'base = "b200"\n[gpu]\nname = ""\narch = "sm_1"\n',
        "tiny.toml": 'base = "h200"\n[gpu]\nsm_count = 1\nsmem_bytes_per_cta = 1\n',
        "twice.csv": "\n".join([csv_lines[0], *csv_lines[1:], *csv_lines[1:]]),
        "header.csv": csv_lines[0] + "\n",
        "wide.csv": "\n".join(line + ",1,2,3" for line in csv_lines),
        "quote.csv": csv_lines[0] + '\n"\n',
        "zero.csv": "\n".join(line.replace("1", "0") for line in csv_lines),
        "huge.csv": "\n".join(line.replace("1", "1" * 30) for line in csv_lines[:3]),
        "null.csv": csv_lines[0] + "\n\0\n",
        "words.txt": "ten twenty\n",
        "minus.txt": "-3 5\n",
        "huge.txt": "99999999999999999999\n",
        "zero.txt": "0 0\n0\n",
        "long.txt": "5\n" * 200_000,
        "loop.ptx": PTX.replace("ret;", "bra end;"),
        "syntax.ptx": PTX.replace("setp", "set!p"),
        "other.ptx": PTX.replace("add.f32", "wmma.f32"),
        "big.ptx": PTX + "// " + "x" * 10**6,
        "many.ptx": PTX + PTX,
        "null.ptx": PTX.replace("x", "\0"),
    }
    for name, text in texts.items():
        (folder / f"strange-{name}").write_text(text, encoding="utf-8")


def value_of(rng: random.Random, name: str, metavar: str, files: Path) -> str:
    """A value for an option or argument of that name."""
    stem = name.strip("-").lower()
    if rng.random() < 0.35:
        return hostile_value(rng, stem, files)
    choices: list[str] = [str(files / path) for path in INPUTS.get(stem, ())]
    if stem == "out":
        choices += out_values(metavar)
    choices += PLAUSIBLE.get(stem, ())
    if not choices and (field := FIELDS.get(stem.replace("-", "_"))):
        choices += field.choices or {
            parse_count: ("1", "2", "8", "64", "128", "1k"), parse_number: ("0", "0.5", "1", "2"),
            parse_window: ("128,0", "none,5", "-1,3"), parse_flag: ("yes",),
        }.get(field.parse, ("1",))  # fmt: skip
    value = rng.choice(choices or ["0", "1", "2", "64", "128"])
    return misspelt(rng, value) if rng.random() < 0.15 and "/" not in value else value


def misspelt(rng: random.Random, value: str) -> str:
    """Nearly a value that is allowed: what a person types by mistake."""
    at = rng.randrange(len(value) + 1)
    return rng.choice(
        (value.upper(), value.capitalize(), f" {value}", f"{value} ", f"-{value}", f"{value},",
         f"{value},{value}", value[:-1], value[:at] + value[at + 1 :], f"{value}x", f"{value}=",
         f"{value[:at]}\N{ZERO WIDTH SPACE}{value[at:]}", f"{value}{'9' * 30}", f"'{value}'",
         value.translate({ord("a"): "\N{CYRILLIC SMALL LETTER A}", ord("1"): "l"}), value * 300)
    )  # fmt: skip


def hostile_value(rng: random.Random, stem: str, files: Path) -> str:
    """A hostile text or file; for options that name files, mostly files of their kind."""
    wanted = {path.rsplit(".", 1)[1] for path in INPUTS.get(stem, ())}
    writes = stem in ("out", "output", "csv", "figure", "trace")
    if not writes and rng.random() < (0.8 if wanted else 0.1):
        every = sorted(path for path in files.iterdir())
        kind = [path for path in every if path.suffix[1:] in wanted]
        return str(rng.choice(kind if kind and rng.random() < 0.8 else every))
    if writes and rng.random() < 0.7:
        kind = rng.choice(
            ("json", "png", "svg", "npz", "safetensors", "toml", "csv", "npy", "txt", "html")
        )
        return rng.choice(
            (f"folder.{kind}", f"full.{kind}", f"file.{kind}", f"file.{kind}/x.{kind}", f"x.{kind}",
             f"a/b/c.{kind}", f"{'a' * 300}.{kind}", f"zero.{kind}", f".{kind}",
             f"x=full.{kind}", f"x=folder.{kind}", f"\N{COLLISION SYMBOL}.{kind}")
        )  # fmt: skip
    return rng.choice(HOSTILE)


def out_values(metavar: str) -> list[str]:
    """Names of results, by what the option says it writes."""
    if "NAME" in metavar:
        return ["y=y.npy", "x=x.npy"]
    return ["o.npz", "o.safetensors", "o.json", "o.svg", "o.png", "o.html", "folder"]


def make_places(folder: Path) -> None:
    """What lies in the folder that a command writes to: folders, files and a full disk."""
    for kind in ("json", "png", "svg", "npz", "safetensors", "toml", "csv", "npy", "txt", "html"):
        (folder / f"folder.{kind}").mkdir()
        (folder / f"file.{kind}").write_bytes(b"what was there before")
        (folder / f"full.{kind}").symlink_to("/dev/full")
        (folder / f"zero.{kind}").symlink_to("/dev/zero")
