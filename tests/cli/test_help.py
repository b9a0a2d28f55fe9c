"""Every help page fits 80 columns. Every option has a help text, and every number a range or a unit."""

import os
import re
import sys
from dataclasses import dataclass

import pytest

from paceline.cli.main import OVERVIEW, main
from paceline.cli.options import parse_options
from paceline.cli.train_arguments import parse
from paceline.learners.learner import LEARNERS
from paceline.tasks import registry

RANGE = re.compile(r"at least|above|at most|\bfrom -?\d|\d to -|\d to \d|between")
UNIT = re.compile(r", (m|m/s|kg|s|rad|rad/s|N)[.;]|[Ww]eight|Reward for|[Ff]actor|quaternion")
"""Words of the help text of a task's option whose numbers are not limited, such as a weight or a position."""


COMMANDS = [
    [],
    *([name] for name in re.findall(r"^  paceline (\S+)", OVERVIEW, re.MULTILINE)),
    ["train", "cartpole"],
    *(["scale", name] for name in ("horizontal", "vertical", "forecast")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_a_help_page_that_fits_80_columns(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["paceline", *command, "--help"])
    assert main() == 0
    page = capsys.readouterr().out
    assert "paceline" in page
    assert [line for line in page.splitlines() if len(line) > 80] == []
    if command == ["train", "cartpole"]:
        assert "--env.max-force" in page
        assert "--ppo.horizon" in page


@pytest.mark.timeout(30)
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_very_narrow_terminal_has_the_help_page_of_40_columns(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pages = list[str]()
    for columns in ("40", "1"):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr(sys, "argv", ["paceline", *command, "--help"])
        assert main() == 0
        assert os.environ["COLUMNS"] == columns
        pages.append(capsys.readouterr().out)
    assert "paceline" in pages[0]
    assert pages[1] == pages[0]


def test_line_breaks_of_docstrings_are_not_those_of_the_help_page(capsys: pytest.CaptureFixture[str]):
    @dataclass(frozen=True)
    class Options:
        """Title.

        A second
        paragraph.
        """

        number: int = 1
        """Number of
        things."""
        other: int = 2  # Number in a comment.

    with pytest.raises(SystemExit):
        parse_options(Options, ["--help"], "command")
    page = capsys.readouterr().out
    assert "  Title.\n  A second paragraph.\n" in page
    assert "Number of things. (default: 1)" in page
    assert "Number in a comment. (default: 2)" in page


def help_texts(argv: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the help text of each option, by its name and the type of its value, without its default."""
    with pytest.raises(SystemExit):
        parse([*argv, "--help"])
    texts, last = dict[str, str](), ""
    for line in capsys.readouterr().out.splitlines():
        # Without a terminal, lines have no frame.
        inner = line[2:].rstrip("│ ")
        if line[:2] not in ("│ ", "  ") or set(inner) <= set("─-"):
            last = ""
        elif inner.startswith("-") and last.endswith(","):
            # The second name of a long option is on its own line.
            texts[f"{last} {inner}"] = texts.pop(last)
            last = f"{last} {inner}"
        elif inner.startswith("-"):
            last, _, text = re.sub("  +", "\0", inner, count=1).partition("\0")
            texts[last] = text
        elif last:
            texts[last] += f" {inner.strip()}"
    return {name: re.sub(r"\((default|repeatable|required|sets).*", "", text).strip() for name, text in texts.items()}


def missing(texts: dict[str, str], prefix: str, *allowed: re.Pattern[str]) -> list[str]:
    """Return the options with `prefix` that have no sentence, and the numbers that match none of the patterns."""
    own = {name: text for name, text in texts.items() if name.startswith(prefix)}
    assert own
    numbers = [name for name in own if re.search(r"\b(INT|FLOAT)\b", name)]
    without = [name for name in numbers if not any(pattern.search(own[name]) for pattern in allowed)]
    return [name for name, text in own.items() if not re.match(r"[A-Z].*\.$", text)] + without


@pytest.mark.parametrize("learner", LEARNERS)
def test_every_setting_of_a_learner_has_a_help_text_and_every_number_its_range(
    learner: str, capsys: pytest.CaptureFixture[str]
):
    texts = help_texts(["cartpole", "--learner", learner], capsys)
    assert not missing(texts, f"--{LEARNERS[learner].settings.flags}.", RANGE)
    assert not missing(texts, "--", re.compile("."))


@pytest.mark.parametrize("task", [*registry.names(), "gymnasium:Pendulum-v1"])
def test_every_option_of_a_task_has_a_help_text_and_every_number_its_range_or_unit(
    task: str, capsys: pytest.CaptureFixture[str]
):
    assert not missing(help_texts([task], capsys), "--env.", RANGE, UNIT)


def test_an_option_without_a_sentence_or_a_range_is_found():
    texts = {"--a INT": "Number, at least 1.", "--b INT": "", "--c FLOAT": "A number.", "--d": "Use it."}
    assert missing(texts, "--", RANGE) == ["--b INT", "--b INT", "--c FLOAT"]
