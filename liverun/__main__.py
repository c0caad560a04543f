"""``python -m liverun`` is the ``liverun`` command; the one place of this package that imports the launcher."""

from launcher.cli import main

if __name__ == "__main__":
    main()
