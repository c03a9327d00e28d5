"""pytest plugin: `pytest --fa4-backend=NAME` adds one test item per property of the suite.

    pytest --fa4-backend=mypackage.module:attention --fa4-only 'causal*' --fa4-strict -m fa4

The options are those of `fa4 verify` with `--fa4-` in front, but for what pytest has itself (-x,
--junitxml, -n of pytest-xdist). Each item has the marker `fa4`: `-m fa4` runs them alone, `-m "not
fa4"` everything else.

A broken property fails with the smallest example and a test to paste; what the back end does not
offer is skipped with the reason. The fixture `fa4_backend` gives tests of your own the loaded
back end. Installed with fa4 as an entry point; without the option, it does nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class PropertyFailed(Exception):
    """A property that is broken; its text is all that pytest shows."""


class PropertyItem(pytest.Item):
    """One property of the suite as a test."""

    def __init__(self, *, prop: Any, **other: Any) -> None:
        super().__init__(**other)
        self.prop = prop
        self.add_marker("fa4")

    def runtest(self) -> None:
        """Run the property; fails, or skips what is not covered."""
        from fa4.testing.causes import group_failures
        from fa4.testing.report import FAILED, NOT_COVERED, NOT_ROBUST, evidence_of
        from fa4.testing.runner import run_property

        options = _options(self.config)
        most = self.prop.first_look if options.quick else None
        doctor = _doctor(self.config)
        result = run_property(self.prop, doctor.backend, options, most, doctor)
        self.user_properties.append(("fa4 cases", result.cases))
        if result.worst_share is not None:
            self.user_properties.append(("fa4 error / budget", round(result.worst_share, 4)))
        if result.status == NOT_COVERED:
            pytest.skip(f"not covered: {result.reason}")
        if result.status == NOT_ROBUST:
            pytest.skip(f"not robust, and not claimed to be: {result.error}")
        if result.status == FAILED:
            causes = [group.cause for group in group_failures(evidence_of([result]))]
            raise PropertyFailed("\n".join([*causes, result.error, "", result.test]))

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """The example and the test to paste, without a traceback through Hypothesis."""
        if isinstance(excinfo.value, PropertyFailed):
            return f"{self.prop.description}\n{excinfo.value}"
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the item says it comes from."""
        return self.path, None, self.name


# Options by name: what argparse is told. Those of `VerifyOptions` but for `jobs` and `exitfirst`.
_OPTIONS: dict[str, dict[str, Any]] = {
    "backend": {
        "metavar": "NAME",
        "help": "run fa4's property suite on reference, oracle, torch-sdpa or module:function",
    },
    "only": {
        "action": "append",
        "metavar": "PATTERN",
        "help": "only properties of this name or pattern, as 'gradients*' (repeatable)",
    },
    "dtype": {
        "action": "append",
        "metavar": "TYPE",
        "help": "only this element type: fp32, bf16, fp16, fp64 (repeatable)",
    },
    "quick": {"action": "store_true", "help": "a few cases of everything"},
    "max-examples": {
        "type": int,
        "default": 20,
        "metavar": "N",
        "help": "cases that Hypothesis draws per property (default 20); those of the covering "
        "design come with them",
    },
    "steps": {
        "type": int,
        "default": 12,
        "metavar": "N",
        "help": "calls in a row of a session (default 12)",
    },
    "seed": {"type": int, "default": 0, "metavar": "N", "help": "seed of the cases (default 0)"},
    "timeout": {
        "type": float,
        "metavar": "SECONDS",
        "help": "for one call; runs the function in a worker process",
    },
    "isolate": {
        "action": "store_true",
        "default": None,
        "help": "run the function in a worker process (default: for what uses CUDA)",
    },
    "no-isolate": {
        "action": "store_false",
        "dest": "fa4_isolate",
        "help": "run the function in this process",
    },
    "strict": {"action": "store_true", "help": "the robustness properties must hold, too"},
}


def pytest_addoption(parser: Any) -> None:
    """The options of `fa4 verify`."""
    group = parser.getgroup("fa4", "property tests of attention functions")
    for name, how in _OPTIONS.items():
        group.addoption(f"--fa4-{name}", **how)


def pytest_configure(config: Any) -> None:
    """Register the marker; refuse bad options before anything is collected."""
    config.addinivalue_line("markers", "fa4: a property of fa4's suite (--fa4-backend)")
    if config.getoption("fa4_backend") is None:
        return
    try:
        _options(config)
    except ImportError as error:
        raise pytest.UsageError(str(error)) from error
    except ValueError as error:
        raise pytest.UsageError(f"--fa4-...: {error}") from error


def _options(config: Any) -> Any:
    """The `VerifyOptions` that are asked for; ValueError for bad ones."""
    from fa4.testing import VerifyOptions

    only, dtypes = config.getoption("fa4_only"), config.getoption("fa4_dtype")
    return VerifyOptions(
        only=tuple(only) if only else None,
        dtypes=tuple(dtypes) if dtypes else None,
        quick=config.getoption("fa4_quick"),
        max_examples=config.getoption("fa4_max_examples"),
        steps=config.getoption("fa4_steps"),
        seed=config.getoption("fa4_seed"),
        timeout_s=config.getoption("fa4_timeout"),
        isolate=config.getoption("fa4_isolate"),
        strict=config.getoption("fa4_strict"),
    )


def _doctor(config: Any) -> Any:
    """Who looks at the back end of the option; UsageError for a name that leads nowhere."""
    name = config.getoption("fa4_backend")
    if not hasattr(config, "_fa4_doctor"):
        try:
            from fa4.testing import load_backend
            from fa4.testing.diagnosis import Doctor
            from fa4.testing.runner import prepare

            config._fa4_doctor = Doctor(prepare(load_backend(name), _options(config)))
        except (ValueError, ImportError) as error:
            raise pytest.UsageError(f"--fa4-backend: {error}") from error
    return config._fa4_doctor


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: Any, config: Any, items: list[Any]) -> None:
    """Add the suite; first of all plugins, so that -k and -m see the new items too."""
    if config.getoption("fa4_backend") is None:
        return
    from fa4.testing import find_properties

    backend = _doctor(config).backend
    items.extend(
        PropertyItem.from_parent(
            session,
            name=f"fa4[{prop.name}]",
            nodeid=f"fa4::{backend.name}::{prop.name}",
            prop=prop,
        )
        for prop in find_properties(_options(config).only)
    )


@pytest.fixture(scope="session")
def fa4_backend(request: Any) -> Iterator[Any]:
    """The `fa4.testing.Backend` of --fa4-backend; tests that use it are skipped without one."""
    if request.config.getoption("fa4_backend") is None:
        pytest.skip("needs --fa4-backend")
    yield _doctor(request.config).backend
