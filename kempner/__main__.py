"""`python -m kempner` is `kempner`."""

from __future__ import annotations

from kempner.cli.entry import main

if __name__ == "__main__":
    main()
