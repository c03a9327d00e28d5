"""A process that runs command lines one after the other: started by `fuzz.Worker`.

Reads a line of JSON {"arguments", "folder"}, runs `fa4` with these arguments in that folder with
stdout and stderr going to files, and answers with a line of JSON. FUZZ_SETUP is code to run first.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
import traceback
from typing import Any

DATA_BYTES = 8 << 30


def run(arguments: list[str]) -> tuple[Any, str]:
    """(exit code, traceback of what is not an exit)."""
    from fa4 import cli

    try:
        cli.main(arguments)
    except SystemExit as stop:
        return stop.code, ""
    except BaseException:
        return None, traceback.format_exc()
    return None, "main returned"


def main() -> None:
    """Answer until stdin ends."""
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    answers = os.fdopen(os.dup(1), "w")
    exec(os.environ.get("FUZZ_SETUP", ""), {})
    places = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
    for place, number in zip(places, (1, 2), strict=True):
        os.dup2(place.fileno(), number)
    for line in sys.stdin:
        request = json.loads(line)
        os.chdir(request["folder"])
        began = time.process_time()
        code, fault = run(request["arguments"])
        spent = time.process_time() - began
        texts = []
        for place, stream in zip(places, (sys.stdout, sys.stderr), strict=True):
            stream.flush()
            size = os.fstat(place.fileno()).st_size
            texts.append(os.pread(place.fileno(), min(size, 1 << 20), 0).decode("utf-8", "replace"))
            os.ftruncate(place.fileno(), 0)
            os.lseek(place.fileno(), 0, os.SEEK_SET)
        answer = {"code": code, "fault": fault, "out": texts[0], "err": texts[1], "size": size}
        answer["seconds"] = spent
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
