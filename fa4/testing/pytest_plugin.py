"""pytest plugin: `pytest --fa4-backend=NAME` adds one test item per property of the suite.

    pytest --fa4-backend=mypackage.module:attention --fa4-max-examples 50 -k "fa4 and causal"

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

    def __init__(self, *, prop: Any, backend: Any, **other: Any) -> None:
        super().__init__(**other)
        self.prop, self.backend = prop, backend

    def runtest(self) -> None:
        """Run the property; fails, or skips what is not covered."""
        from fa4.testing.report import FAILED, NOT_COVERED, NOT_ROBUST
        from fa4.testing.runner import VerifyOptions, run_property

        options = VerifyOptions(
            max_examples=self.config.getoption("fa4_max_examples"),
            seed=self.config.getoption("fa4_seed"),
        )
        result = run_property(self.prop, self.backend, options)
        if result.status == NOT_COVERED:
            pytest.skip(f"not covered: {result.reason}")
        if result.status == NOT_ROBUST:
            pytest.skip(f"not robust, and not claimed to be: {result.error}")
        if result.status == FAILED:
            raise PropertyFailed(f"{result.error}\n\n{result.test}")

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """The example and the test to paste, without a traceback through Hypothesis."""
        if isinstance(excinfo.value, PropertyFailed):
            return f"{self.prop.description}\n{excinfo.value}"
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Where the item says it comes from."""
        return self.path, None, self.name


def pytest_addoption(parser: Any) -> None:
    """The three options."""
    group = parser.getgroup("fa4", "property tests of attention functions")
    group.addoption(
        "--fa4-backend",
        metavar="NAME",
        help="run fa4's property suite on reference, oracle, torch-sdpa or module:function",
    )
    group.addoption(
        "--fa4-max-examples",
        type=int,
        default=20,
        metavar="N",
        help="cases that Hypothesis draws per property (default 20); those of the covering design "
        "come with them",
    )
    group.addoption(
        "--fa4-seed", type=int, default=0, metavar="N", help="seed of the cases (default 0)"
    )


def pytest_configure(config: Any) -> None:
    """Refuse bad options before anything is collected."""
    if config.getoption("fa4_backend") is None:
        return
    for option, least in (("fa4_max_examples", 1), ("fa4_seed", 0)):
        value = config.getoption(option)
        if value < least:
            name = option.replace("_", "-")
            raise pytest.UsageError(f"--{name} must be at least {least}; got {value}")


def _load(config: Any) -> Any:
    """The back end of the option; UsageError for a name that leads nowhere."""
    name = config.getoption("fa4_backend")
    if not hasattr(config, "_fa4_backend"):
        try:
            from fa4.testing import load_backend
            from fa4.testing.isolation import isolate

            loaded = load_backend(name)
            config._fa4_backend = isolate(loaded) if loaded.isolate_by_default else loaded
        except (ValueError, ImportError) as error:
            raise pytest.UsageError(f"--fa4-backend: {error}") from error
    return config._fa4_backend


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: Any, config: Any, items: list[Any]) -> None:
    """Add the suite; first of all plugins, so that -k and -m see the new items too."""
    if config.getoption("fa4_backend") is None:
        return
    backend = _load(config)
    try:
        from fa4.testing import PROPERTIES
    except ImportError as error:
        raise pytest.UsageError(str(error)) from error
    items.extend(
        PropertyItem.from_parent(
            session,
            name=f"fa4[{prop.name}]",
            nodeid=f"fa4::{backend.name}::{prop.name}",
            prop=prop,
            backend=backend,
        )
        for prop in PROPERTIES
    )


@pytest.fixture(scope="session")
def fa4_backend(request: Any) -> Iterator[Any]:
    """The `fa4.testing.Backend` of --fa4-backend; tests that use it are skipped without one."""
    if request.config.getoption("fa4_backend") is None:
        pytest.skip("needs --fa4-backend")
    yield _load(request.config)
