"""``python -m autoplace`` is the ``autoplace`` command."""

from autoplace.cli import main

if __name__ == "__main__":
    main()
