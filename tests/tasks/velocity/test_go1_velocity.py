"""A quadruped follows commands: parts of the task, and a policy trained on MuJoCo Warp in MuJoCo's C engine."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import Step
from paceline.errors import UserError
from paceline.robots.legged import GO1_LEGS
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.tasks.velocity.go1_velocity import Go1Rewards, Go1Velocity
from paceline.tasks.velocity.velocity_task import RandomizationRanges
from paceline.train import train

# paceline train go1-velocity --num-envs 4096, after 329 iterations on an H200, exported as TorchScript.
POLICY = Path(__file__).parent / "data" / "go1_velocity.pt"
QUIET = Go1Velocity(observation_noise_scale=0.0, push_seconds=0.0, randomize=False)


@torch.inference_mode()
def walk(env: RobotEnv, steps: int) -> list[Step]:
    policy, obs, taken = torch.jit.load(POLICY), env.reset(), []
    for _ in range(steps):
        taken.append(env.step(policy(obs["policy"])))
        obs = taken[-1].obs
    return taken


def speeds(steps: list[Step]) -> Tensor:
    """Return the mean forward velocity, lateral velocity and yaw rate after the first second, [env, 3]."""
    obs = torch.stack([step.final_obs["critic"] for step in steps[50:]]).mean(0)
    return torch.cat((obs[:, :2], obs[:, 5:6]), dim=1)


def test_a_policy_from_the_gpu_walks_as_commanded_in_the_other_engine():
    """With noise, pushes and randomization, as in training."""
    env = RobotEnv(Go1Velocity(episode_seconds=8.0), 24, seed=5)
    steps = walk(env, env.max_episode_steps)
    assert not torch.stack([step.terminated for step in steps]).any()
    assert steps[-1].truncated.all()
    means = dict(zip(env.log_names, steps[-1].log.mean(0).tolist(), strict=True))
    assert means["measure/velocity_error"] < 0.2
    assert means["measure/turn_error"] < 0.3


def test_the_policy_follows_its_commands():
    env = RobotEnv(dataclasses.replace(QUIET, command_seconds=1e6, standing_fraction=0.0), 24, seed=1)
    actual, command = speeds(walk(env, 150)), env.env_state.task_state["command"]
    for axis in range(3):
        assert torch.corrcoef(torch.stack((actual[:, axis], command[:, axis])))[0, 1] > 0.95


def test_the_policy_stands_at_zero_commands():
    env = RobotEnv(dataclasses.replace(QUIET, standing_fraction=1.0), 8)
    assert speeds(walk(env, 150)).abs().max() < 0.1
    assert (env.env_state.task_state["command"] == 0.0).all()


def test_commands_are_within_their_bounds_and_some_are_zero():
    task = dataclasses.replace(
        QUIET, max_forward_speed=2.0, max_lateral_speed=0.3, max_yaw_rate=1.5, standing_fraction=0.25
    )
    command = RobotEnv(task, 2000).env_state.task_state["command"]
    assert (command.abs() <= torch.tensor((2.0, 0.3, 1.5))).all()
    assert (command.abs().amax(0) > torch.tensor((1.9, 0.28, 1.4))).all()
    assert (command == 0.0).all(1).float().mean() == pytest.approx(0.25, abs=0.04)


def test_the_mean_time_between_commands_is_the_option():
    env = RobotEnv(dataclasses.replace(QUIET, command_seconds=0.5, standing_fraction=0.0), 64)
    changes, before = 0, env.env_state.task_state["command"].clone()
    for _ in range(25):
        ended = env.step(torch.zeros(64, env.num_actions)).terminated
        now = env.env_state.task_state["command"].clone()
        changes += int(((now != before).any(1) & ~ended).sum())
        before = now
    # Half a second in 64 envs.
    assert changes == pytest.approx(64, rel=0.35)


def test_a_fall_ends_the_episode():
    env = RobotEnv(QUIET, 3)
    state = env.state()
    state["sim/qpos"][1, 2:7] = torch.tensor((0.2, 0.0, 1.0, 0.0, 0.0))
    env.load_state(state)
    assert env.step(torch.zeros(3, env.num_actions)).terminated.tolist() == [False, True, False]


def test_pushes_have_the_given_rate_and_maximum_speed():
    env = RobotEnv(dataclasses.replace(QUIET, push_seconds=0.2), 32)
    pushes = []
    for _ in range(20):
        env.step(torch.zeros(32, env.num_actions))
        pushes.append(env.env_state.task_state["push"].clone())
    pushed = torch.stack(pushes).ne(0.0).any(2).float().mean()
    assert pushed == pytest.approx(0.1, abs=0.04)
    assert torch.stack(pushes).abs().max() <= 0.5


def test_only_the_policy_observes_noise():
    loud, quiet = (RobotEnv(dataclasses.replace(QUIET, observation_noise_scale=scale), 16) for scale in (1.0, 0.0))
    for env in (loud, quiet):
        env.step(torch.zeros(16, env.num_actions))
    noisy, clean = (env.observe() for env in (loud, quiet))
    assert torch.equal(noisy["critic"], clean["critic"])
    off = (noisy["policy"] - clean["policy"]).abs()
    assert (off[:, :33].amax(0) > 0.0).all()
    assert (off[:, 33:] == 0.0).all()
    assert off[:, :3].max() <= 0.1


def test_friction_and_mass_differ_between_envs():
    env = RobotEnv(Go1Velocity(), 64)
    feet = [env.sim.model.geom(f"{leg}_foot").id for leg in GO1_LEGS]
    friction = env.sim.field("geom_friction")[:, feet, 0]
    assert (friction == friction[:, :1]).all()
    assert friction.min() >= 0.4
    assert friction.max() < 1.2
    assert friction[:, 0].std() > 0.1
    trunk = env.sim.field("body_mass")[:, env.sim.model.body("trunk").id]
    assert trunk.min() > 4.2
    assert trunk.std() > 0.5


def test_motors_differ_in_strength_with_one_factor_for_stiffness_and_damping():
    env = RobotEnv(Go1Velocity(), 64)
    model, gain, bias = env.sim.model, env.sim.field("actuator_gainprm"), env.sim.field("actuator_biasprm")
    strength = gain[:, :, 0] / torch.from_numpy(model.actuator_gainprm[:, 0]).float()
    assert strength.min() >= 0.9
    assert strength.max() < 1.1
    assert (strength.std(dim=0) > 0.03).all()
    assert (strength.std(dim=1) > 0.02).all()
    for column in (1, 2):
        scaled = strength * torch.from_numpy(model.actuator_biasprm[:, column]).float()
        torch.testing.assert_close(bias[:, :, column], scaled.to(bias.dtype))


def test_the_result_of_a_run_has_the_tracking_errors(tmp_path: Path):
    settings = {"horizon": 8, "epochs": 1, "minibatches": 2, "hidden": (16,)}
    config = TrainConfig("go1-velocity", {"episode_seconds": 0.2}, settings=settings, num_envs=8, max_iterations=2)
    result = train(config, RunDir(tmp_path / "run"), Console(quiet=True))
    assert set(result["measures"]) == {"velocity_error", "turn_error"}
    assert 0.0 < result["measures"]["velocity_error"] < 3.0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["measures"] == result["measures"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_forward_speed": -1.0}, "--env.max-forward-speed -1 must be above 0"),
        ({"observation_noise_scale": -1.0}, "--env.observation-noise-scale -1 must be at least 0"),
        ({"max_push_speed": math.nan}, "--env.max-push-speed nan"),
        ({"history": 0}, "--env.history 0 must be at least 1"),
        ({"delay": (3, 1)}, "--env.delay 3 1 must be the minimum and the maximum in control steps"),
    ],
)
def test_the_error_for_an_invalid_option_names_its_flag(options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        Go1Velocity(**options)


def test_history_and_delay_are_options():
    plain, late = RobotEnv(QUIET, 64), RobotEnv(dataclasses.replace(QUIET, history=3, delay=(1, 2)), 64)
    assert late.reset()["policy"].shape[1] == 3 * plain.reset()["policy"].shape[1]
    assert late.state()["observation_history/delay"].unique().tolist() == [1, 2]


def test_the_display_has_the_command_and_the_actual_velocity():
    env = RobotEnv(QUIET, 3)
    env.step(torch.ones(3, env.num_actions))
    command, velocity = env.env_state.task_state["command"], env.env_state.sensor("velocity")
    display = QUIET.command_display(env.env_state)
    assert display.velocity is not None
    assert torch.equal(display.velocity[0], command[:, :2])
    assert torch.equal(display.velocity[1], velocity[:, :2])
    assert torch.equal(torch.stack([commanded for commanded, _ in display.numbers.values()], dim=1), command)
    assert torch.equal(display.numbers["yaw rad/s"][1], env.env_state.sensor("gyro")[:, 2])


def test_a_reward_weight_is_an_option():
    task = dataclasses.replace(QUIET, rewards=Go1Rewards(track_lin_vel=3.0))
    plain, doubled = RobotEnv(QUIET, 4), RobotEnv(task, 4)
    terminated = torch.zeros(4, dtype=torch.bool)
    changed, default = (env.task.reward(env.env_state, terminated) for env in (doubled, plain))
    assert torch.equal(changed.pop("track_lin_vel"), 2.0 * default.pop("track_lin_vel"))
    assert all(torch.equal(changed[name], default[name]) for name in default)
    assert set(default) | {"track_lin_vel"} == {option.name for option in dataclasses.fields(Go1Rewards)}


def test_a_randomization_range_is_an_option():
    friction = RobotEnv(Go1Velocity(randomization=RandomizationRanges(friction=(2.0, 2.5))), 16).sim.field(
        "geom_friction"
    )
    foot = Go1Velocity().model().geom(f"{GO1_LEGS[0]}_foot").id
    assert ((friction[:, foot, 0] >= 2.0) & (friction[:, foot, 0] < 2.5)).all()


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"friction": (1.2, 0.4)}, r"--env.randomization.friction 1.2 0.4 must be a minimum and a maximum"),
        ({"friction": (-0.1, 0.4)}, "--env.randomization.friction -0.1 must be at least 0"),
        ({"base_mass": (0.0, math.nan)}, "--env.randomization.base-mass nan must be between"),
    ],
)
def test_an_invalid_randomization_range_is_rejected(ranges: dict[str, tuple[float, float]], message: str):
    with pytest.raises(UserError, match=message):
        Go1Velocity(randomization=RandomizationRanges(**ranges))


def test_a_range_that_allows_a_negative_mass_is_rejected():
    task = Go1Velocity(randomization=RandomizationRanges(base_mass=(-100.0, 0.0)))
    with pytest.raises(UserError, match="randomization of body_mass: from -100 to 0 the mass of a body of"):
        RobotEnv(task, 1)
