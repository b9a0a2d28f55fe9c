"""The entry point, light enough that Ctrl-C is heard from the start."""

import sys

from paceline.interrupts import EXIT_CODE


def main() -> None:
    try:
        from paceline.cli import main as run

        run()
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        sys.exit(EXIT_CODE)


if __name__ == "__main__":
    main()
