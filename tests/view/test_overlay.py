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
from paceline.view.overlay import ARROW_SECONDS, Episode, Panel, Scores, VelocityArrows, command_of
from tests.env.lively import Lively

PANEL_HEIGHT = 480


@dataclass(frozen=True)
class Shows(Go1Velocity):
    """A task that commands twice the actual velocity."""

    def command_display(self, state: EnvState) -> CommandDisplay:
        speed = state.sensor("velocity")
        return CommandDisplay({"forward m/s": (2.0 * speed[:, 0], speed[:, 0])}, (2.0 * speed[:, :2], speed[:, :2]))


def played(env: RobotEnv, steps: int, action: float = 0.0) -> tuple[Scores, list[dict[str, float]]]:
    """Return the scores after some steps and the log of each step."""
    scores, rows = Scores(env), []
    env.reset()
    for _ in range(steps):
        step = env.step(torch.full((env.num_envs, env.num_actions), action))
        rows.append(dict(zip(env.log_names, step.log[0].tolist(), strict=True)))
        scores.add(step)
    return scores, rows


def test_an_episode_has_its_reward_terms_in_descending_order_and_its_end():
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


def test_recent_terms_are_means_over_the_latest_fifth_of_a_second():
    env = RobotEnv(Cartpole(initial_pole_angle=0.01), 1)
    scores, rows = played(env, 30)
    # 60 steps a second: two intervals of 12 are over.
    for name, value in scores.recent_terms.items():
        assert value == pytest.approx((rows[23][f"reward/{name}"] - rows[11][f"reward/{name}"]) / 12, abs=1e-6)


def test_an_episode_ends_at_its_time_limit_and_the_next_one_starts_from_zero():
    env = RobotEnv(Cartpole(initial_pole_angle=0.01, episode_seconds=0.5), 1)
    scores, _ = played(env, 40)
    assert [episode.end for episode in scores.all_episodes()] == ["time limit", "running"]
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
    """Return a gray frame with the panel."""
    shown = Panel(height)
    shown.update(scores, command)
    return shown.blend(np.full((height, 640, 3), 128, np.uint8))


def covered(frame: np.ndarray) -> tuple[int, int]:
    """Return the number of rows and columns of the frame that are not gray."""
    changed = (frame != 128).any(axis=2)
    return int(changed.any(axis=1).sum()), int(changed.any(axis=0).sum())


def test_the_panel_has_bright_text_on_a_dark_background_in_a_corner():
    scores, _ = played(RobotEnv(Cartpole(initial_pole_angle=0.01), 1), 30)
    frame = panel(scores)
    rows, columns = covered(frame)
    assert 80 < rows < 240
    assert 120 < columns < 280
    inside = frame[12:rows, 12:columns].mean(axis=2)
    assert inside.max() > 230.0
    assert np.median(inside) < 80.0
    assert (frame[-200:] == 128).all()
    assert (frame[:, -320:] == 128).all()


def test_the_panel_changes_with_the_scores_and_does_not_modify_the_given_frame():
    env = RobotEnv(Cartpole(initial_pole_angle=0.01), 1)
    early, late = (panel(played(env, steps)[0]) for steps in (15, 45))
    assert (early != late).any()
    gray = np.full((480, 640, 3), 128, np.uint8)
    shown = Panel(480)
    shown.update(played(env, 15)[0], None)
    shown.blend(gray)
    assert (gray == 128).all()


def test_a_panel_exists_before_the_first_step():
    env = RobotEnv(Cartpole(), 1)
    assert covered(panel(Scores(env)))[0] > 20


def test_target_and_actual_have_their_own_colors_and_a_command_makes_the_panel_longer():
    env = RobotEnv(Shows(), 1)
    scores, _ = played(env, 20)
    without, with_command = panel(scores), panel(scores, command_of(env))
    assert covered(with_command)[0] > covered(without)[0] + 20
    red, green, blue = np.moveaxis(with_command.astype(int), 2, 0)
    assert ((green - red > 80) & (green - blue > 60)).sum() > 20
    assert ((blue - red > 80) & (blue - green > 60)).sum() > 20


def test_with_many_terms_and_measures_the_panel_still_fits_the_frame():
    env = RobotEnv(Shows(), 1)
    scores, _ = played(env, 20)
    for height in (240, 480, 1080):
        rows, columns = covered(panel(scores, command_of(env), height))
        assert rows < height
        assert columns < 640


# Commands and arrows


def test_a_command_comes_from_the_task_or_from_its_task_state_or_is_none():
    shows, cartpole = RobotEnv(Shows(), 1), RobotEnv(Cartpole(), 1)
    command = command_of(shows)
    assert command is not None
    assert list(command.numbers) == ["forward m/s"]
    assert command_of(cartpole) is None
    lively = RobotEnv(Lively(), 1)
    plain = command_of(lively)
    assert plain is not None
    assert plain.velocity is None
    assert torch.stack([values for (values,) in plain.numbers.values()], 1).equal(lively.state()["task_state/command"])
    assert covered(panel(Scores(lively), plain))[0] > 20


def arrows_at(yaw: float, target: Tensor, actual: Tensor) -> list[np.ndarray]:
    model = Shows().model()
    data = mujoco.MjData(model)
    mujoco.mj_resetDataKeyframe(model, data, 0)
    data.qpos[:7] = (3.0, 2.0, 0.3, np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2))
    mujoco.mj_forward(model, data)
    arrows = VelocityArrows(model).make(CommandDisplay({}, (target, actual)), data)
    for arrow in arrows:
        assert arrow.start[:2] == pytest.approx((3.0, 2.0))
        assert arrow.start[2] > max(data.geom_xpos[1:, 2])
    return [arrow.end - arrow.start for arrow in arrows]


def test_arrows_point_along_the_commanded_and_the_actual_velocity():
    target, actual = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.25]])
    ahead = arrows_at(0.0, target, actual)
    assert ahead[0] == pytest.approx((ARROW_SECONDS, 0.0, 0.0))
    assert ahead[1] == pytest.approx((0.5 * ARROW_SECONDS, 0.25 * ARROW_SECONDS, 0.0))
    turned = arrows_at(np.pi / 2, target, actual)
    assert turned[0] == pytest.approx((0.0, ARROW_SECONDS, 0.0))
    assert turned[1] == pytest.approx((-0.25 * ARROW_SECONDS, 0.5 * ARROW_SECONDS, 0.0))


def test_zero_velocity_has_no_arrow():
    assert arrows_at(0.0, torch.zeros(1, 2), torch.zeros(1, 2)) == []


def test_without_a_velocity_or_a_free_robot_there_are_no_arrows():
    model = Cartpole().model()
    data = mujoco.MjData(model)
    still = torch.ones(1, 2)
    assert VelocityArrows(model).make(CommandDisplay({}, (still, still)), data) == []
    assert VelocityArrows(Shows().model()).make(None, data) == []
