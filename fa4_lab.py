"""The start of the `fa4` command, outside the package: what goes wrong on import is one line too.

Named after the distribution, so that no other one called `fa4` brings a file of this name.
"""

from __future__ import annotations

import sys

# As fa4/base/install.py says it, which may be what is missing.
REINSTALL = "pip install --force-reinstall --no-deps PATH, of your checkout or wheel of fa4-lab"


def main() -> None:
    """Import the command line and run it; exits with its code, 2 where it cannot be imported."""
    try:
        from fa4.base.install import refuse_mixed_files

        refuse_mixed_files()
        from fa4.cli import main as run
    except ImportError as error:
        said = " ".join(str(error).split())
        if (error.name or "").startswith("fa4"):  # a file of ours is missing or another's
            said += f": {REINSTALL}"
        print(f"fa4: error: {said}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("fa4: interrupted", file=sys.stderr)
        sys.exit(130)
    run()
