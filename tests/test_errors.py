"""Parts of messages."""

from paceline.errors import counted


def test_only_one_is_singular():
    assert [counted(number, "rank") for number in (0, 1, 2, 11)] == ["0 ranks", "1 rank", "2 ranks", "11 ranks"]
    assert counted(f"{1000:,}", "env step") == "1,000 env steps"
    assert counted(f"{1.0:.3g}", "iteration") == "1 iteration"
