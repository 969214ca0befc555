"""`python -m sashiko` and the console script."""

from __future__ import annotations

import sys


def main() -> int:
    """Runs the command line and returns its exit status."""
    # Imported here, so that `import sashiko.__main__` by tools that list entry points costs nothing.
    from .cli.app import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
