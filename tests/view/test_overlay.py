"""The panel and the arrows of videos, from real envs."""

from dataclasses import dataclass

import mujoco
import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.env.task import CommandDisplay, EnvState
from paceline.tasks.cartpole import Cartpole
from paceline.tasks.velocity.go1_velocity import Go1Velocity
from paceline.view.overlay import METRES_PER_SPEED, Arrows, Episode, Panel, Scores, command_of
from tests.env.lively import Lively

PANEL_HEIGHT = 480


@dataclass(frozen=True)
class Shows(Go1Velocity):
    """Its command is twice what is done, in each direction."""

    def command_display(self, state: EnvState) -> CommandDisplay:
        speed = state.sensor("velocity")
        return CommandDisplay({"forward m/s": (2.0 * speed[:, 0], speed[:, 0])}, (2.0 * speed[:, :2], speed[:, :2]))


def played(env: RobotEnv, steps: int, action: float = 0.0) -> tuple[Scores, list[dict[str, float]]]:
    """The scores after some steps, and each step's reward terms, with the return so far."""
    scores, rows = Scores(env), []
    env.reset()
    for _ in range(steps):
        step = env.step(torch.full((env.num_envs, env.num_actions), action))
        rows.append(dict(zip(env.log_names, step.log[0].tolist(), strict=True)))
        scores.add(step)
    return scores, rows


def test_an_episode_is_told_with_its_terms_largest_first_and_its_end():
    env = RobotEnv(Cartpole(), 1)
    scores, rows = played(env, 400)
    assert scores.ended
    ends = [index for index, row in enumerate(rows[:-1]) if rows[index + 1]["length"] < row["length"]]
    assert len(scores.ended) in (len(ends), len(ends) + 1)
    first, last = scores.ended[0], rows[ends[0]]
    assert (first.end, first.measures) == ("terminated", {})
    assert first.seconds == pytest.approx(last["length"] / 60.0)
    assert first.total == pytest.approx(last["return"]) == pytest.approx(sum(first.terms.values()), rel=1e-4)
    assert first.terms == {name: last[f"reward/{name}"] for name in first.terms}
    sizes = [abs(term) for term in first.terms.values()]
    assert sizes == sorted(sizes, reverse=True)


def test_lately_is_the_mean_of_each_term_over_the_latest_fifth_of_a_second():
    env = RobotEnv(Cartpole(initial_pole_angle=0.01), 1)
    scores, rows = played(env, 30)
    # 60 steps a second: two stretches of 12 are over.
    for name, value in scores.lately.items():
        assert value == pytest.approx((rows[23][f"reward/{name}"] - rows[11][f"reward/{name}"]) / 12, abs=1e-6)


def test_an_episode_that_reaches_its_limit_says_so_and_the_next_one_counts_anew():
    env = RobotEnv(Cartpole(initial_pole_angle=0.01, episode_seconds=0.5), 1)
    scores, _ = played(env, 40)
    assert [episode.end for episode in scores.all()] == ["time limit", "running"]
    assert scores.ended[0].seconds == pytest.approx(0.5)
    assert scores.running.seconds == pytest.approx(10 / 60)


def test_lines_for_a_console_fit_80_columns_and_leave_out_the_smallest_terms():
    terms = {f"a_rather_long_term_{i}": 10.0 / (i + 1) for i in range(9)}
    measures = {"velocity_error": 0.0831, "turn_error": 0.2, "command_range": 1.0}
    lines = Episode(20.0, 31.416, terms, measures, "time limit").lines(3)
    assert lines[0] == "episode 3: 20.0 s, its time limit, return 31.42"
    assert lines[1] == "  velocity error 0.0831, turn error 0.2, command range 1"
    assert lines[2].startswith("  a rather long term 0 10, a rather long term 1 5, ")
    assert lines[2].endswith(", ...")
    assert max(map(len, lines)) <= 80
    assert Episode(1.0, -2.0, {}, {}, "terminated").lines(1) == ["episode 1: ended after 1.0 s, return -2.00"]


# The panel


def panel(scores: Scores, command: CommandDisplay | None = None, height: int = PANEL_HEIGHT) -> np.ndarray:
    """On grey."""
    shown = Panel(height)
    shown.show(scores, command)
    return shown.on(np.full((height, 640, 3), 128, np.uint8))


def covered(picture: np.ndarray) -> tuple[int, int]:
    """How many rows and columns of the picture are not grey."""
    changed = (picture != 128).any(axis=2)
    return int(changed.any(axis=1).sum()), int(changed.any(axis=0).sum())


def test_the_panel_has_bright_text_on_a_dark_ground_in_a_corner():
    scores, _ = played(RobotEnv(Cartpole(initial_pole_angle=0.01), 1), 30)
    picture = panel(scores)
    rows, columns = covered(picture)
    assert 80 < rows < 240
    assert 120 < columns < 280
    inside = picture[12:rows, 12:columns].mean(axis=2)
    assert inside.max() > 230.0
    assert np.median(inside) < 80.0
    assert (picture[-200:] == 128).all()
    assert (picture[:, -320:] == 128).all()


def test_the_panel_changes_with_the_scores_and_the_picture_given_is_not_written_to():
    env = RobotEnv(Cartpole(initial_pole_angle=0.01), 1)
    early, late = (panel(played(env, steps)[0]) for steps in (15, 45))
    assert (early != late).any()
    grey = np.full((480, 640, 3), 128, np.uint8)
    shown = Panel(480)
    shown.show(played(env, 15)[0], None)
    shown.on(grey)
    assert (grey == 128).all()


def test_before_the_first_step_there_is_a_panel_too():
    env = RobotEnv(Cartpole(), 1)
    assert covered(panel(Scores(env)))[0] > 20


def test_asked_and_done_have_colours_of_their_own_and_a_command_makes_the_panel_longer():
    env = RobotEnv(Shows(), 1)
    scores, _ = played(env, 20)
    without, with_command = panel(scores), panel(scores, command_of(env))
    assert covered(with_command)[0] > covered(without)[0] + 20
    red, green, blue = np.moveaxis(with_command.astype(int), 2, 0)
    assert ((green - red > 80) & (green - blue > 60)).sum() > 20
    assert ((blue - red > 80) & (blue - green > 60)).sum() > 20


def test_with_many_terms_and_measures_the_panel_still_fits_the_picture():
    env = RobotEnv(Shows(), 1)
    scores, _ = played(env, 20)
    for height in (240, 480, 1080):
        rows, columns = covered(panel(scores, command_of(env), height))
        assert rows < height
        assert columns < 640


# Commands and arrows


def test_a_command_is_shown_as_the_task_says_or_as_its_numbers_or_not_at_all():
    shows, cartpole = RobotEnv(Shows(), 1), RobotEnv(Cartpole(), 1)
    command = command_of(shows)
    assert command is not None
    assert list(command.numbers) == ["forward m/s"]
    assert command_of(cartpole) is None
    lively = RobotEnv(Lively(), 1)
    plain = command_of(lively)
    assert plain is not None
    assert plain.velocity is None
    assert torch.stack([asked for (asked,) in plain.numbers.values()], 1).equal(lively.state()["task_state/command"])
    assert covered(panel(Scores(lively), plain))[0] > 20


def arrows_at(yaw: float, asked: Tensor, done: Tensor) -> list[np.ndarray]:
    model = Shows().model()
    world = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, world, 0)
    world.qpos[:7] = (3.0, 2.0, 0.3, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2))
    mujoco.mj_forward(model, world)
    drawn = Arrows(model).of(CommandDisplay({}, (asked, done)), world)
    for arrow in drawn:
        assert arrow.start[:2] == pytest.approx((3.0, 2.0))
        assert arrow.start[2] > max(world.geom_xpos[1:, 2])
    return [arrow.end - arrow.start for arrow in drawn]


def test_arrows_point_where_the_robot_is_asked_to_go_and_where_it_goes():
    asked, done = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.25]])
    ahead = arrows_at(0.0, asked, done)
    assert ahead[0] == pytest.approx((METRES_PER_SPEED, 0.0, 0.0))
    assert ahead[1] == pytest.approx((0.5 * METRES_PER_SPEED, 0.25 * METRES_PER_SPEED, 0.0))
    turned = arrows_at(np.pi / 2, asked, done)
    assert turned[0] == pytest.approx((0.0, METRES_PER_SPEED, 0.0))
    assert turned[1] == pytest.approx((-0.25 * METRES_PER_SPEED, 0.5 * METRES_PER_SPEED, 0.0))


def test_who_is_to_stand_has_no_arrow():
    assert arrows_at(0.0, torch.zeros(1, 2), torch.zeros(1, 2)) == []


def test_without_a_velocity_or_a_free_robot_there_are_no_arrows():
    model = Cartpole().model()
    world = mujoco.MjData(model)
    still = torch.ones(1, 2)
    assert Arrows(model).of(CommandDisplay({}, (still, still)), world) == []
    assert Arrows(Shows().model()).of(None, world) == []
