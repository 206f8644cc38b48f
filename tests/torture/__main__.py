"""Run as `python tests/torture`."""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:1] = [str(TESTS), str(TESTS / "helpers")]  # not this folder, whose modules have common names

from torture.run import main  # noqa: E402

if __name__ == "__main__":  # processes that campaigns start import this file, too
    sys.exit(main())
