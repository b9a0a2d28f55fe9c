"""The entry point, light enough that Ctrl-C is heard from the start."""

import sys


def main() -> None:
    try:
        from paceline.cli import main as run

        run()
    except KeyboardInterrupt:
        print("paceline: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
