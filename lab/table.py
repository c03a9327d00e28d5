"""Every file of recorded results: the command that makes it, what it is made from, what holds it.

A record that a CPU computes is computed again by a test (`recomputed_by`), or its sources must be
those of today (neither that nor `needs`), which a test sees to. One that needs a GPU, the times of
a machine or hours says so in `needs`; docs/records.md and the pages that quote it then show how old
it is.
"""

from __future__ import annotations

from dataclasses import dataclass

GPU, TIMES, HOURS = "a GPU", "times of a machine", "hours of a CPU"
PUBLISHED = "what others published"


@dataclass(frozen=True, kw_only=True)
class Record:
    """One result file.

    command: makes it, in the project's folder ("GPU: ..." on such a machine). modules: whose code
    decides what is in it; what they import comes with them. files: others that they read, as
    patterns from the root. tables: written with it. needs: why tests cannot compute it again; None
    where they can. recomputed_by: path::name of the test that does.
    """

    path: str
    command: str
    modules: tuple[str, ...]
    files: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    needs: str | None = None
    recomputed_by: str | None = None

    @property
    def name(self) -> str:
        """Its file's, without suffix."""
        return self.path.rpartition("/")[2].partition(".")[0]


_KERNELS = ("fa4.backends.sm90", "fa4.api")


def _computed(name: str, test: str | None = None, *, also: tuple[str, ...] = (),
              files: tuple[str, ...] = (), needs: str | None = None) -> Record:  # fmt: skip
    """A record of lab/benchmarks/NAME.py."""
    return Record(
        path=f"lab/benchmarks/results/{name}.json", command=f"python -m lab.benchmarks.{name}",
        modules=(f"lab.benchmarks.{name}", *also), files=files, needs=needs,
        recomputed_by=test,
    )  # fmt: skip


def _faults(kernel: str) -> Record:
    """A record of planted faults: "" for those of the emulator's own examples."""
    program = f"{kernel}faults"
    return Record(
        path=f"lab/benchmarks/results/{kernel or 'emulator_'}faults.json",
        command=f"python -m lab.benchmarks.{program}",
        modules=(f"lab.benchmarks.{program}",), needs=HOURS,
    )  # fmt: skip


def _confirmed(name: str, command: str, *modules: str, files: tuple[str, ...] = ()) -> Record:
    """A record of lab/hardware/results."""
    return Record(
        path=f"lab/hardware/results/{name}.json", command=command, modules=modules, files=files,
        needs=GPU,
    )  # fmt: skip


def _suite(name: str, module: str) -> Record:
    """A record of stored launches: `make` of the module, `lab.hardware.suite` there, `compare`."""
    module = f"lab.hardware.{module}"
    return _confirmed(
        name, f"python -m {module} compare FOLDER RESULTS.npz", module, "lab.hardware.suite"
    )


def _programs(name: str) -> Record:
    """A record that compare.py of a folder writes of what its run_there.py brought home."""
    folder = f"lab.hardware.{name}"
    return _confirmed(
        name, f"python -m {folder}.compare", f"{folder}.compare", f"{folder}.run_there"
    )


def _units(name: str, only: str, *programs: str) -> Record:
    return _confirmed(
        name, f"GPU: python3 -m lab.hardware.hopper_units.measure {only}--output {name}.json",
        "lab.hardware.hopper_units.measure", files=tuple(
            f"lab/hardware/hopper_units/{program}.cu*" for program in ("common", *programs)
        ),
    )  # fmt: skip


def _sweep(name: str, table: str) -> Record:
    """The table of a sweep, and the file that says where it was measured."""
    path, sweep = f"lab/hardware/results/{name}.json", "lab.hardware.warpgroup_forward.sweep"
    return Record(
        path=path, command=f"python -m {sweep} table RESULTS.jsonl {table} {path} --gpu GPU.csv",
        modules=(sweep,), tables=(table,), needs=GPU,
    )  # fmt: skip


_COMPARED = (
    "python -m lab.hardware.hopper_counters.compare lab/hardware/hopper_counters/{0}.json FOLDER"
)


RECORDS = (
    _faults("backward_"),
    Record(
        path="lab/benchmarks/results/backward_traffic.json",
        command="python -m tests.sm100.backward_traffic", modules=("tests.sm100.backward_traffic",),
        recomputed_by="tests/sm100/test_backward_traffic.py::test_the_result_file_is_the_present_one",
    ),
    _computed("claims", "tests/sim/test_recorded_predictions.py::test_the_papers_claims"),
    _computed("codegen", needs=TIMES, also=("lab.benchmarks.codegen_kernels",)),
    _computed("design", needs=TIMES),
    _computed("emulator", needs=TIMES),
    _faults(""),
    Record(
        path="lab/benchmarks/results/emulator_foreign.json", command="make conformance RECORD=1",
        modules=("fa4.emulator.host.session", "tests.conformance.record"), needs=HOURS,
    ),
    _computed("features"),
    _computed("gradient_order", files=(
        "lab/hardware/results/hopper_random_gradients.json",
        "lab/hardware/results/hopper_random_gradients_h100.json",
    )),
    _computed("first_launch", needs=TIMES, also=("fa4.emulator.host.ptx_launch",)),
    _faults("foreign_"),
    _faults("forward_"),
    _faults("gradient_"),
    _computed(
        "forward_prediction",
        "tests/sim/test_recorded_predictions.py::test_predictions_of_the_forward_kernels",
    ),
    _computed("halves_code", needs=TIMES),
    _faults("halves_"),
    _computed("host", needs=TIMES, also=("fa4.backends.sm100", "fa4.backends.emulator")),
    Record(
        path="lab/benchmarks/results/models.json", command="python -m lab.benchmarks.models.walk",
        modules=("lab.benchmarks.models.walk", "fa4.backends.reference"), needs=HOURS,
    ),
    Record(
        path="lab/benchmarks/results/mutants.json", command="make mutants",
        needs=HOURS, modules=(
            "lab.benchmarks.mutants.run", "fa4.reference", "fa4.sim.predict",
            "fa4.testing.properties",
        ),
    ),
    Record(
        path="lab/benchmarks/results/mutants_testing.json",
        command='make mutants MUTANTS="--package testing --count 160 --seed 867286750"',
        needs=HOURS, modules=("lab.benchmarks.mutants.run", "fa4.testing.properties"),
    ),
    _computed("predictions", "tests/sim/test_predictions.py::test_the_recorded_figures"),
    _computed("reference", needs=TIMES, also=("fa4.backends.reference",)),
    _computed("sim", needs=TIMES),
    Record(
        path="lab/benchmarks/results/strangers.json",
        command="python -m lab.benchmarks.strangers FOLDER", needs=HOURS,
        modules=(
            "lab.benchmarks.strangers", "lab.benchmarks.strangers_chosen",
            "fa4.emulator.host.session",
        ),
    ),
    _computed(
        "validation", files=("fa4/measured/*.csv", "lab/hardware/results/hopper_sweep_again.csv")
    ),
    _computed("verify", needs=HOURS),
    _faults("warpgroup_"),
    _faults("wide_gradient_"),
    Record(
        path="fa4/explore/verdicts.json", command="python -m lab.benchmarks.record_verdicts",
        modules=("lab.benchmarks.record_verdicts",), needs=HOURS,
    ),
    _suite("backward_hopper", "backward_hopper.prepost"),
    _suite("backward_skeleton_hopper", "backward_hopper.skeleton"),
    _confirmed(
        "ds_exchange", "GPU: python -m lab.hardware.ds_exchange", "lab.hardware.ds_exchange",
        files=("lab/hardware/ds_exchange.cu",),
    ),
    _programs("emulator_hopper"),
    _confirmed(
        "findings", "GPU: python3 -m lab.hardware.run_findings", "lab.hardware.run_findings",
        files=("docs/findings/*.py",),
    ),
    _suite("forward_hopper", "forward_hopper.neutral"),
    _suite("forward_skeleton_hopper", "forward_hopper.skeleton"),
    _suite("halves_skeleton_hopper", "forward_hopper.halves"),
    *(
        _confirmed(
            f"guarded_calls_{gpu}", "GPU: python3 -m lab.hardware.guarded.random_calls",
            "lab.hardware.guarded.random_calls", *_KERNELS,
        )
        for gpu in ("h100", "h200")
    ),
    _confirmed(
        "halves_step", "GPU: python -m lab.hardware.halves_step", "lab.hardware.halves_step",
        files=("lab/hardware/halves_step.cu",),
    ),
    _confirmed(
        "h200_exp2", "GPU: python -m lab.hardware.h200_exp2", "lab.hardware.h200_exp2",
        files=("lab/hardware/h200_exp2.cu",),
    ),
    _confirmed("hopper_bench", "GPU: fa4 bench --json", "fa4.commands.bench", *_KERNELS),
    _confirmed(
        "hopper_counters", _COMPARED.format("own"), "lab.hardware.hopper_counters.compare",
        "lab.hardware.hopper_counters.measure", "lab.hardware.hopper_counters.launch",
        "lab.hardware.hopper_counters.emulate", "lab.hardware.hopper_counters.simulate",
        files=("lab/hardware/hopper_counters/own.json",),
    ),
    _confirmed(
        "hopper_counters_foreign", _COMPARED.format("foreign"),
        "lab.hardware.hopper_counters.compare", "lab.hardware.hopper_counters.measure",
        "lab.hardware.hopper_counters.launch",
        files=("lab/hardware/hopper_counters/foreign.json",),
    ),
    _confirmed(
        "hopper_launches", "GPU: python3 -m lab.hardware.warpgroup_forward.random_launches",
        "lab.hardware.warpgroup_forward.random_launches", *_KERNELS,
    ),
    _confirmed(
        "hopper_random", "GPU: fa4 bench --random 200 --timing graph --json",
        "fa4.commands.bench_random", *_KERNELS,
    ),
    _confirmed(
        "hopper_random_anew", "GPU: fa4 bench --random 200 --timing graph --json",
        "fa4.commands.bench_random", *_KERNELS,
    ),
    *(
        _confirmed(
            f"hopper_random_gradients{gpu}",
            "GPU: fa4 bench --random 200 --backward --timing graph --json",
            "fa4.commands.bench_random", *_KERNELS,
        )
        for gpu in ("", "_h100")
    ),
    _confirmed(
        "hopper_random_gradients_anew",
        "GPU: fa4 bench --random 200 --backward --backends fa4 --timing graph --json",
        "fa4.commands.bench_random", *_KERNELS,
    ),
    _confirmed(
        "hopper_splits", "GPU: python3 -m lab.hardware.warpgroup_forward.splits OUT.json",
        "lab.hardware.warpgroup_forward.splits", *_KERNELS,
    ),
    Record(
        path="lab/hardware/results/hopper_tiles.json",
        command="python -m lab.hardware.warpgroup_forward.tiles RESULTS.jsonl --table "
        "lab/hardware/results/hopper_tiles.csv",
        modules=("lab.hardware.warpgroup_forward.tiles",), needs=GPU,
        tables=("lab/hardware/results/hopper_tiles.csv",),
    ),
    _units(
        "hopper_beside", "--only queue streams beside ", "queue", "streams", "beside", "boxes",
    ),
    _units("hopper_ports", "--only ports rows ", "ports", "rows", "boxes"),
    _units("hopper_starts", "--only starts energy ", "starts", "power"),
    _units("hopper_steps", "--only steps ", "steps", "wgmma", "softmax"),
    _confirmed(
        "hopper_sustained", "GPU: python3 -m lab.hardware.warpgroup_forward.sustained",
        "lab.hardware.warpgroup_forward.sustained",
    ),
    _confirmed(
        "hopper_designs", "python -m lab.hardware.hopper_designs.compare PLAN.json RESULTS.jsonl",
        "lab.hardware.hopper_designs.choose", "lab.hardware.warpgroup_forward.measure",
    ),
    _sweep("hopper_sweep", "fa4/measured/hopper_sweep.csv"),
    _sweep("hopper_sweep_again", "lab/hardware/results/hopper_sweep_again.csv"),
    _units(
        "hopper_units", "", "barriers", "copies", "launch", "memory", "pipes", "power", "softmax",
        "wgmma",
    ),
    _confirmed(
        "ranks_of_one_gpu", "GPU: torchrun --nproc_per_node 2 -m lab.hardware.distributed.one_gpu",
        "lab.hardware.distributed.one_gpu", *_KERNELS,
    ),
    _confirmed(
        "repeated_launches", "GPU: python3 -m lab.hardware.repeated_launches",
        "lab.hardware.repeated_launches", *_KERNELS,
    ),
    _confirmed(
        "sanitized", "GPU: python3 -m lab.hardware.sanitized", "lab.hardware.sanitized", *_KERNELS,
    ),
    _confirmed(
        "sanitized_order", "GPU: python3 -m lab.hardware.sanitized_order",
        "lab.hardware.sanitized_order", files=("lab/hardware/sanitized_order.cu",),
    ),
    _confirmed(
        "sanitizer_zoo", "GPU: python3 -m lab.hardware.sanitizer_zoo", "lab.hardware.sanitizer_zoo",
    ),
    _confirmed(
        "small_transformer", "GPU: python3 -m lab.hardware.small_transformer",
        "lab.hardware.small_transformer", *_KERNELS,
    ),
    *(
        _confirmed(
            f"first_tensor_{gpu}", "GPU: python3 -m lab.hardware.guarded.first_tensor",
            "lab.hardware.guarded.first_tensor", *_KERNELS,
        )
        for gpu in ("h100", "h200")
    ),
    *(
        _confirmed(
            f"outside_boxes_{gpu}", "GPU: python3 -m lab.hardware.guarded.outside_boxes",
            "lab.hardware.guarded.outside_boxes",
        )
        for gpu in ("h100", "h200")
    ),
    _confirmed(
        "two_gpus", "GPU: torchrun --nproc_per_node 2 -m lab.hardware.distributed.measure",
        "lab.hardware.distributed.measure", *_KERNELS,
    ),
    _confirmed(
        "verify_gpu", "GPU: python -m lab.hardware.verify_gpu --out out.json --jobs 14 "
        "fa4-sm90 torch-sdpa-cudnn flash-attn-4",
        "lab.hardware.verify_gpu", "lab.hardware.gpu_backends",
    ),
    *(
        _confirmed(
            f"warpgroup_backward{gpu}", "GPU: python3 -m lab.hardware.warpgroup_backward.measure",
            "lab.hardware.warpgroup_backward.measure", *_KERNELS,
        )
        for gpu in ("", "_h100")
    ),
    _confirmed(
        "warpgroup_backward_wide", "GPU: python3 -m lab.hardware.warpgroup_backward.measure --wide",
        "lab.hardware.warpgroup_backward.measure", *_KERNELS,
    ),
    _suite("warpgroup_bits", "warpgroup_bits.suite"),
    _confirmed(
        "warpgroup_forward", "GPU: python3 -m lab.hardware.warpgroup_forward.measure "
        "lab/hardware/warpgroup_forward/peers.json FILE.jsonl",
        "lab.hardware.warpgroup_forward.measure",
        files=("lab/hardware/warpgroup_forward/peers.json",),
    ),
    _confirmed(
        "warpgroup_fp8", "GPU: python3 -m lab.hardware.warpgroup_fp8.measure "
        "lab/hardware/warpgroup_fp8/variants.json FILE.jsonl; then "
        "lab.hardware.warpgroup_fp8.record",
        "lab.hardware.warpgroup_fp8.measure", files=("lab/hardware/warpgroup_fp8/variants.json",),
    ),
    _programs("wgmma_sums"),
    Record(
        path="lab/hardware/results/h200x2_ring.csv", needs=GPU, modules=(),
        command="GPU: a program from before fa4.distributed; each row says of what",
    ),
    Record(
        path="lab/hardware/results/ring_flash_attn.csv", needs=PUBLISHED, modules=(),
        command="copied by hand; each row names its source",
    ),
)  # fmt: skip
BY_NAME = {record.name: record for record in RECORDS}
