"""Length of the modules."""

from pathlib import Path

import paceline

MOST_LINES = 400


def test_no_module_is_too_long():
    package = Path(paceline.__file__).parent
    lengths = {str(file.relative_to(package)): len(file.read_text().splitlines()) for file in package.rglob("*.py")}
    assert {file: length for file, length in lengths.items() if length > MOST_LINES} == {}
