"""`python -m kempner` is `kempner`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Files there may have the names of modules of Python's own.
    if sys.path[:1] == [os.getcwd()]:  # noqa: PTH109 - it imports nothing
        sys.path.append(sys.path.pop(0))
    from kempner.cli.entry import main

    main()
