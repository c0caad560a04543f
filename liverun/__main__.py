"""``python -m liverun`` is the ``liverun`` command: the one import of the launcher in this package."""

import sys
from pathlib import Path

if not sys.flags.safe_path:
    # python -m puts the current folder first, where a user may keep a launcher.py of their own
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launcher.cli import main

if __name__ == "__main__":
    main()
