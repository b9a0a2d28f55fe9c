import io

from rich.console import Console

from paceline.process.stage import stage


def test_a_terminal_shows_the_stage_and_then_removes_it():
    console = Console(file=(output := io.StringIO()), force_terminal=True, width=80)
    with stage(console, "Loading", lambda: "3 modules"):
        assert "Loading" in output.getvalue()
    assert "3 modules" in output.getvalue()
    assert output.getvalue().endswith("\x1b[?25h"), "the cursor is shown again"


def test_other_outputs_get_no_stage():
    console = Console(file=(output := io.StringIO()))
    with stage(console, "Loading"):
        pass
    assert output.getvalue() == ""
