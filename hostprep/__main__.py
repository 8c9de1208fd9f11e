"""`hostprep`: the engine half's commands start without the node half's libraries."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line. Returns the exit code."""
    try:
        from hostprep.linux.output import with_output

        return with_output(_run)
    except KeyboardInterrupt:  # while modules are loaded: nothing was begun
        sys.stderr.write("hostprep: interrupted\n")
        return 130


def _run() -> int:
    from hostprep.engines.main import COMMANDS

    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        from hostprep.engines.main import main as engine_main

        return engine_main()
    try:
        from hostprep.cli.main import main as node_main
    except ModuleNotFoundError as error:
        if error.name != "hostprep.cli":
            raise
        # The zipapp before an installed package, on an engine's PYTHONPATH: it says what it has.
        from hostprep.engines.main import main as engine_main

        return engine_main()
    return node_main()


if __name__ == "__main__":
    sys.exit(main())
