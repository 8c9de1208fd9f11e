"""`hostprep-operator`."""

from __future__ import annotations

import sys

from hostprep_operator.cli import main

if __name__ == "__main__":
    sys.exit(main())
