"""Sweeps on a dask cluster: an optional extra, imported only when it is asked for.

Also: what identifies the model, which workers and files of an earlier run must agree on.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

MODEL = ("config.py", "hardware.py", "plan/*.py", "search/*.py", "sim/*.py")
CONNECT_SECONDS = 20
CHUNKS_IN_FLIGHT = 1000


def model_version() -> str:
    """Digest of the source text that predictions rest on, where this runs."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for part in MODEL:
        for path in sorted(package.glob(part)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def map_on_cluster(
    address: str, function: Callable[[Item], list[Result]], items: Iterable[Item]
) -> Iterator[Result]:
    """The results of `function` on all items, in their order, computed by the cluster's workers.

    Raises ImportError with the pip command if dask is missing, OSError if no scheduler answers at
    `address`, ValueError if it has no workers or they run another version of fa4.
    """
    try:
        from distributed import Client
    except ImportError as error:
        raise ImportError(
            f"a dask cluster needs dask.distributed ({error}): pip install distributed"
        ) from None
    try:
        client = Client(address, timeout=CONNECT_SECONDS)
    except (OSError, ValueError) as error:  # TimeoutError is an OSError
        raise OSError(f"no dask scheduler answers at {address}: {error}") from error
    with client:
        check_workers(client, address)
        waiting: deque[Any] = deque()
        remaining = iter(items)
        while True:
            room = CHUNKS_IN_FLIGHT - len(waiting)
            # Not pure: dask would otherwise remember results by their arguments.
            waiting.extend(client.submit(function, item, pure=False)
                           for item in islice(remaining, room))  # fmt: skip
            if not waiting:
                return
            yield from waiting.popleft().result()


def check_workers(client: Any, address: str) -> None:
    """Raise ValueError unless there are workers, all with this version of fa4."""
    versions, here = client.run(model_version), model_version()
    if not versions:
        raise ValueError(f"the dask cluster at {address} has no workers")
    for worker, version in versions.items():
        if version != here:
            raise ValueError(f"{worker} has another version of fa4: model {version}, here {here}")
