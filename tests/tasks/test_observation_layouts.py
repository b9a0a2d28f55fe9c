"""The page of observations and actions is that of the tasks."""

from pathlib import Path

from tests.tasks.observation_layouts import document


def test_the_page_shows_the_layouts_of_the_tasks():
    page = Path(__file__).parents[2] / "docs" / "observations.md"
    assert page.read_text() == document(), "run python -m tests.tasks.observation_layouts > docs/observations.md"
