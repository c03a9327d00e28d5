"""The machines: B200, B300, H100, H200 and one to come, tables in which each number has a source.

`Gpu` holds what a plan must fit into (shared memory, tensor memory, registers) and what bounds its
speed (rates per clock and per second). Its `sources` name, for each number, where it comes from
and how far to trust it; a number without a source cannot be constructed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType

from fa4.config import require, require_finite, require_int

ARCHES = ("sm_90a", "sm_100a", "sm_103a", "sm_107a")

# high: vendor documentation, a device query or two independent measurements; medium: one careful
# measurement; low: carried over from another machine.
CONFIDENCES = ("high", "medium", "low")

MOST_SMS = 4096  # far beyond any GPU: what is simulated grows with it
MAY_BE_ZERO = ("tmem_cols", "tmem_lanes")  # Hopper has no tensor memory


@dataclass(frozen=True)
class Source:
    """Where a number comes from, in words that let a reader find it, and how far to trust it."""

    text: str
    confidence: str = "high"

    def __post_init__(self) -> None:
        """Refuse an empty source and an unknown confidence."""
        require(bool(self.text.strip()), "a source must say where the number is from", self.text)
        require(self.confidence in CONFIDENCES, f"confidence: one of {CONFIDENCES}", self)


Figure = tuple[float, Source]  # a number and where it comes from


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU model. Rates `_per_clk` are for one SM; `_per_s` for the whole chip.

    clock_hz is the SM clock at which peaks are quoted; max_clock_hz what the chip can boost to.
    mma_flops_per_clk counts dense bf16, an FMA as two. exp_per_clk: exponentials of the special
    function units. smem_bytes_per_cta is the most one CTA may ask for.
    """

    name: str
    arch: str
    sm_count: int
    clock_hz: float
    max_clock_hz: float
    mma_flops_per_clk: int
    exp_per_clk: int
    fma_lanes_per_clk: int
    smem_bytes_per_clk: int
    smem_bytes_per_cta: int
    smem_bytes_per_sm: int
    tmem_cols: int
    tmem_lanes: int
    registers_per_sm: int
    max_registers_per_thread: int
    max_threads_per_cta: int
    max_threads_per_sm: int
    max_ctas_per_sm: int
    l2_bytes: int
    l2_bytes_per_s: float
    hbm_bytes: int
    hbm_bytes_per_s: float
    sources: Mapping[str, Source] = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check ranges, limits that contain each other, and that each number has its source."""
        require(self.arch in ARCHES, f"arch must be one of {ARCHES}", self.arch)
        for name, kind in numeric_fields().items():
            if kind == "int":
                require_int(name, getattr(self, name), 0 if name in MAY_BE_ZERO else 1)
            else:
                require_finite(name, getattr(self, name))
                require(getattr(self, name) > 0, f"{name} must be positive", getattr(self, name))
        require(self.sm_count <= MOST_SMS, f"sm_count must be at most {MOST_SMS}", self.sm_count)
        for name in ("clock_hz", "max_clock_hz"):
            value = getattr(self, name)
            require(1e8 <= value <= 1e10, f"{name} must be between 1e8 and 1e10", value)
        for part, whole in (
            ("clock_hz", "max_clock_hz"),
            ("smem_bytes_per_cta", "smem_bytes_per_sm"),
            ("max_threads_per_cta", "max_threads_per_sm"),
        ):
            pair = (getattr(self, part), getattr(self, whole))
            require(pair[0] <= pair[1], f"{part} must not exceed {whole}", pair)
        missing = sorted(set(numeric_fields()) - set(self.sources))
        unknown = sorted(set(self.sources) - set(numeric_fields()))
        require(not missing, f"every number of {self.name} needs a source; without one", missing)
        require(not unknown, f"{self.name} has sources for numbers it does not hold", unknown)
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))

    def __getstate__(self) -> dict[str, object]:
        """For other processes: a mapping that nobody may change cannot be sent."""
        return {**self.__dict__, "sources": dict(self.sources)}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        object.__setattr__(self, "sources", MappingProxyType(dict(self.sources)))

    @classmethod
    def from_figures(cls, name: str, arch: str, figures: Mapping[str, Figure]) -> Gpu:
        """A Gpu from {field: (number, source)}, which keeps each number beside its source."""
        numbers: dict[str, float] = {key: value for key, (value, _) in figures.items()}
        sources = {key: source for key, (_, source) in figures.items()}
        return cls(name=name, arch=arch, sources=sources, **numbers)  # type: ignore[arg-type]

    @property
    def peak_bf16_flops(self) -> float:
        """Dense bf16 tensor-core FLOP/s of the chip at clock_hz."""
        return self.sm_count * self.mma_flops_per_clk * self.clock_hz

    @property
    def peak_exp_per_s(self) -> float:
        """Exponentials per second of the chip's special function units at clock_hz."""
        return self.sm_count * self.exp_per_clk * self.clock_hz

    @property
    def smem_bytes_per_s(self) -> float:
        """Shared-memory bytes per second of all SMs at clock_hz."""
        return self.sm_count * self.smem_bytes_per_clk * self.clock_hz

    @property
    def ridge_flops_per_byte(self) -> float:
        """FLOPs per byte of device memory above which bf16 products are compute-bound."""
        return self.peak_bf16_flops / self.hbm_bytes_per_s


def numeric_fields() -> dict[str, str]:
    """{field of Gpu: "int" or "float"} for the fields that need a source."""
    return {f.name: str(f.type) for f in fields(Gpu) if f.type in ("int", "float")}


def _same(source: Source, **numbers: float) -> dict[str, Figure]:
    """Figures that share one source."""
    return {name: (number, source) for name, number in numbers.items()}


FA4_PAPER = Source("FlashAttention-4 paper, arXiv 2603.05451, hardware section")
PTX_TENSOR_MEMORY = Source("PTX ISA manual, tcgen05: tensor memory of 128 lanes x 512 columns")
BLACKWELL_TUNING_GUIDE = Source("NVIDIA Blackwell tuning guide, occupancy and shared memory")
H200_QUERY = Source("cuDeviceGetAttribute on an NVIDIA H200")
CUDA_COMPUTE_CAPABILITY = Source("CUDA C++ programming guide, compute capability tables")
H200_MEASURED = Source("measured on an NVIDIA H200: lab/hardware/results/hopper_units.json")
B300_QUERY = Source("device query of a B300 SXM6 in ademeure/QuickRunCUDA, canonical reference")

# What one SM offers, alike on all four (compute capabilities 9.0, 10.0 and 10.3).
_SM_LIMITS = dict(
    registers_per_sm=65536,
    max_registers_per_thread=255,
    max_threads_per_cta=1024,
    max_threads_per_sm=2048,
    max_ctas_per_sm=32,
    smem_bytes_per_cta=227 * 1024,
    smem_bytes_per_sm=228 * 1024,
)
_BLACKWELL_SM: dict[str, Figure] = {
    **_same(BLACKWELL_TUNING_GUIDE, **_SM_LIMITS),
    **_same(PTX_TENSOR_MEMORY, tmem_cols=512, tmem_lanes=128),
    **_same(FA4_PAPER, mma_flops_per_clk=8192, smem_bytes_per_clk=128),
    **_same(CUDA_COMPUTE_CAPABILITY, fma_lanes_per_clk=128),
}
_HOPPER_SM: dict[str, Figure] = {
    **_same(CUDA_COMPUTE_CAPABILITY, **_SM_LIMITS),
    **_same(Source("no tensor memory before tcgen05 (PTX ISA)"), tmem_cols=0, tmem_lanes=0),
}

B200 = Gpu.from_figures(
    "B200",
    "sm_100a",
    _BLACKWELL_SM
    | _same(FA4_PAPER, exp_per_clk=16)
    | {
        "sm_count": (148, Source("SemiAnalysisAI/microbench-blackwell; 148 of 160 SMs enabled")),
        "clock_hz": (
            1.85e9,
            Source("FlashAttention-4 paper: 2.25 PFLOP/s = 148 x 8192 x 1.85 GHz"),
        ),
        "max_clock_hz": (1.965e9, Source("stas00/ml-engineering and microbench-blackwell")),
        "l2_bytes": (132_644_864, Source("microbench-blackwell device query, 126.5 MiB")),
        "l2_bytes_per_s": (20.2e12, Source("measured: TileSight b200.py", "medium")),
        "hbm_bytes": (180 * 10**9, Source("NVIDIA HGX B200 data sheet")),
        "hbm_bytes_per_s": (
            8e12,
            Source("NVIDIA data sheet; TMA reads measured 7.26e12 (SemiAnalysis)"),
        ),
    },
)

B300 = Gpu.from_figures(
    "B300",
    "sm_103a",
    _BLACKWELL_SM
    | {
        "exp_per_clk": (32, Source("FlashAttention-4 paper; 9.22e12/s in ademeure/QuickRunCUDA")),
        "sm_count": (148, B300_QUERY),
        "clock_hz": (1.92e9, Source("sustained under load: ademeure/QuickRunCUDA", "medium")),
        "max_clock_hz": (2.032e9, B300_QUERY),
        "l2_bytes": (132_644_864, B300_QUERY),
        "l2_bytes_per_s": (20.2e12, Source("as B200; QuickRunCUDA saw 17e12 to 26e12", "low")),
        "hbm_bytes": (288 * 10**9, Source("NVIDIA data sheet; some boards show 268 GiB")),
        "hbm_bytes_per_s": (8e12, Source("NVIDIA data sheet; 7.30e12 read in QuickRunCUDA")),
    },
)

GB300 = replace(B300, name="GB300")  # a B300 beside a Grace CPU; no figure of its own was found

# A machine that nobody has measured: what a public kernel library asks of it, the rest a B300's.
AS_B300 = Source("assumed: as a B300; nothing of it was published or measured here", "low")
SM107_LIMITS = Source("limits of SM107 in the kernels of cudnn-frontend 1.32", "medium")
RUBIN = replace(
    B300,
    name="Rubin",
    arch="sm_107a",
    smem_bytes_per_cta=327 * 1024,
    smem_bytes_per_sm=328 * 1024,
    tmem_cols=576,
    sources=dict.fromkeys(B300.sources, AS_B300)
    | dict.fromkeys(("smem_bytes_per_cta", "tmem_cols"), SM107_LIMITS)
    | {
        "smem_bytes_per_sm": Source("assumed: a KiB more than a CTA may have, as before", "low"),
        "exp_per_clk": Source("assumed: twice a B200's, as a B300's", "low"),
    },
)

H100 = Gpu.from_figures(
    "H100",
    "sm_90a",
    _HOPPER_SM
    | _same(CUDA_COMPUTE_CAPABILITY, fma_lanes_per_clk=128, exp_per_clk=16, smem_bytes_per_clk=128)
    | {
        "sm_count": (132, Source("NVIDIA H100 whitepaper, SXM5")),
        "mma_flops_per_clk": (
            4096,
            Source("NVIDIA H100 whitepaper: 989 TFLOP/s = 132 x 4096 x clock"),
        ),
        "clock_hz": (
            1.83e9,
            Source("tensor-core boost clock of SXM5 (whitepaper: 989 TFLOP/s); not measured"),
        ),
        "max_clock_hz": (1.98e9, Source("stas00/ml-engineering, accelerator table")),
        "l2_bytes": (50 * 2**20, Source("NVIDIA H100 whitepaper")),
        "l2_bytes_per_s": (
            9.0e12,
            Source("not measured on an H100; an H200's bytes per clock at 1.83 GHz", "low"),
        ),
        "hbm_bytes": (80 * 10**9, Source("NVIDIA H100 data sheet, SXM5")),
        "hbm_bytes_per_s": (3.35e12, Source("NVIDIA H100 data sheet, SXM5; not measured")),
    },
)

H200 = Gpu.from_figures(
    "H200",
    "sm_90a",
    _HOPPER_SM
    | _same(H200_QUERY, sm_count=132, max_clock_hz=1.98e9, l2_bytes=62_914_560)
    | _same(
        H200_MEASURED,
        mma_flops_per_clk=4096,
        exp_per_clk=16,
        fma_lanes_per_clk=128,
        smem_bytes_per_clk=128,
        l2_bytes_per_s=9.8e12,
    )
    | {
        "clock_hz": (
            1.83e9,
            Source(
                "clock that gives the data sheet's 989 TFLOP/s; measured: 1.98e9 without the tensor"
                " core, 1.66e9 to 1.80e9 for 20 ms with it, then what 700 W allow"
                " (lab/hardware/results/hopper_units.json)"
            ),
        ),
        "hbm_bytes": (141 * 10**9, Source("NVIDIA H200 data sheet; a device shows 143771 MiB")),
        "hbm_bytes_per_s": (
            4.8e12,
            Source("NVIDIA H200 data sheet; reads 4.64e12: lab/hardware/results/hopper_units.json"),
        ),
    },
)

GPUS: Mapping[str, Gpu] = MappingProxyType(
    {gpu.name.lower(): gpu for gpu in (B200, B300, GB300, RUBIN, H100, H200)}
)


def find_gpu(name: str) -> Gpu:
    """The Gpu called `name`, in any case; ValueError lists what there is."""
    gpu = GPUS.get(name.lower())
    if gpu is None:
        raise ValueError(f"gpu must be one of {', '.join(GPUS)}; got {name!r}")
    return gpu
