"""Property tests for attention functions: ours, torch's, yours.

The same suite runs on any function `f(q, k, v, **options)` on NumPy arrays (batch, seqlen, heads,
head_dim) that returns `out` or `(out, lse)`; what it does not offer is reported as not covered.

    from fa4.testing import verify

    report = verify("mypackage.module:attention")   # or "reference", "oracle", "torch-sdpa"
    for group in report.failures:                    # failures with one cause, the simplest first
        print(group.needs, group.smallest.test)      # a test ready to paste into a file

Or from the shell: `fa4 verify --backend mypackage.module:attention`, or
`pytest --fa4-backend=mypackage.module:attention`. For tests of your own there are `strategies`,
`build_inputs` (arrays of a drawn `Case`), `Outputs` and `assert_within_budget` (the error budget).
`fa4.testing.contract` says what a back end may offer, `fa4.testing.backends` its names.

Needs hypothesis, of the extra `test`. It is imported at the first use of a name, so that the pytest
plugin costs nothing where it is not used.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "Case": "case",
    "MASK_MODS": "case",
    "SCORE_MODS": "case",
    "REGIMES": "values",
    "Inputs": "inputs",
    "build_inputs": "layouts",
    "dense_inputs": "inputs",
    "BudgetReport": "budget",
    "Outputs": "budget",
    "assert_within_budget": "budget",
    "check_budget": "budget",
    "plain_attention": "plain",
    "plain_gradients": "plain",
    "Backend": "backends",
    "BackendFailed": "backends",
    "isolate": "isolation",
    "NotCovered": "backends",
    "load_backend": "backends",
    "list_backends": "backends",
    "PROPERTIES": "properties",
    "Property": "property",
    "check_property": "properties",
    "find_properties": "properties",
    "FailureGroup": "causes",
    "Symptom": "causes",
    "PropertyResult": "report",
    "VerifyReport": "report",
    "VerifyOptions": "runner",
    "verify": "runner",
    "shrink": "shrink",
    "Walk": "walk",
    "open_session": "sessions.machines",
    "session_test": "sessions.own_tests",
}
_NEED_HYPOTHESIS = {"strategies", "property", "properties", "runner", "sessions.machines",
                    "sessions.own_tests"}  # fmt: skip

__all__ = [*_HOMES, "strategies"]


def __getattr__(name: str) -> Any:
    """Import what is asked for; ImportError with the pip command where hypothesis is missing."""
    home = "strategies" if name == "strategies" else _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f"{__name__}.{home}")
    except ModuleNotFoundError as error:
        if error.name != "hypothesis" or home not in _NEED_HYPOTHESIS:
            raise
        raise ImportError(
            f"fa4.testing.{name} needs hypothesis: pip install 'hypothesis>=6.112'"
        ) from error
    return module if name == "strategies" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
