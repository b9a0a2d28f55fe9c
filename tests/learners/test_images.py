"""Libraries on images: they train, resume bit by bit, agree on all ranks, and their policies are exported."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tensordict import TensorDict
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState
from paceline.env.training_settings import TrainingSettings
from paceline.errors import UserError
from paceline.export import export
from paceline.learners.learner import LEARNERS, Learner
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.train import train
from tests.cameras.small import SMALL_CAMERA, SMALL_ENCODER, SMALL_RUN
from tests.cameras.test_tiled_camera import SmallTask
from tests.distributed.ranks import on_ranks
from tests.learners.test_contract import common, digest, flat, same

TRAINING = TrainingSettings(horizon=4, epochs=1, minibatches=2, hidden_layers=(16,), **SMALL_ENCODER)


class ImageTask(SmallTask):
    """Only images."""

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        return {}


class FusedTask(SmallTask):
    """Images and a vector."""

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        return {"policy": torch.cat((state.qpos, state.qvel), dim=1)}


TASKS = {
    "images": ImageTask(),
    "images and critic": SmallTask(camera=replace(SMALL_CAMERA, streams=("rgb", "depth"))),
    "images and vector": FusedTask(camera=replace(SMALL_CAMERA, streams=("rgb", "depth", "classes"), frames=2)),
}


def skrl_mean(learner: Any, obs: dict[str, Tensor]) -> Tensor:
    return torch.from_dlpack(learner.agent.act(*learner.inputs(obs), timestep=0, timesteps=0)[1]["mean_actions"])


def rl_games_mean(learner: Any, obs: dict[str, Tensor]) -> Tensor:
    named = {"obs": learner.agent.images.pack(obs), "states": obs.get("critic")}
    return learner.agent.get_action_values(named)["mus"]


# Mean actions that the library computes.
MEAN_ACTIONS: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {
    "rsl_rl": lambda learner, obs: learner.algorithm.actor(TensorDict(obs, [4])),
    "rl_games": rl_games_mean,
    "skrl": skrl_mean,
    "skrl_jax": skrl_mean,
}


def make(learner: str, task: SmallTask, group: Group | None = None, **training: Any) -> tuple[RobotEnv, Learner]:
    settings = LEARNERS[learner].settings.from_training(replace(TRAINING, **training))
    settings.check()
    env = RobotEnv(task, 4)
    return env, LEARNERS[learner].make(env, settings, 0, group or Group(Rank()))


# JAX compiles for seconds: one task with everything.
CASES = [(learner, task) for learner in ("rsl_rl", "skrl") for task in TASKS]
CASES += [("rl_games", "images"), ("rl_games", "images and critic"), ("skrl_jax", "images and vector")]


@pytest.mark.parametrize(("learner", "task"), CASES)
def test_convolutions_are_trained_and_a_resumed_learner_continues_bit_by_bit(learner: str, task: str):
    env, first = make(learner, TASKS[task])
    before = flat(first.state()["networks"])
    first.learn()
    saved = first.state()
    kernels = {name: value for name, value in flat(saved["networks"]).items() if value.dim() == 4}
    assert len(kernels) >= 2
    assert all(not torch.equal(value, before[name]) for name, value in kernels.items())

    _, resumed = make(learner, TASKS[task])
    resumed.load_state(saved)
    for each in (first, resumed):
        each.learn()
    assert digest(first.state()) == digest(resumed.state())

    obs = env.observe()
    with torch.no_grad():
        expected = MEAN_ACTIONS[learner](first, obs)
    torch.testing.assert_close(first.policy()(obs), expected, rtol=1e-4, atol=1e-5)


def train_on_rank() -> list[dict[str, Any]]:
    group, states = Group(this_rank(())), []
    for learner in ("rsl_rl", "rl_games", "skrl"):
        _, trained = make(learner, TASKS["images and critic"], group)
        trained.learn()
        states.append(common(trained.state()))
    group.close()
    return states


def test_all_ranks_have_the_same_networks():
    first, second = on_ranks(2, train_on_rank, seconds=120.0)
    assert [same(*pair) for pair in zip(first, second, strict=True)] == [True] * 3


@pytest.mark.parametrize("learner", MEAN_ACTIONS)
def test_a_trained_policy_is_exported(learner: str, tmp_path: Path):
    settings = asdict(LEARNERS[learner].settings.from_training(TRAINING))
    config = TrainConfig(
        **SMALL_RUN, learner=learner, num_envs=4, max_iterations=1, settings=settings, logger=("none",)
    )
    train(config, RunDir(tmp_path / "run"), Console(quiet=True))
    # Both compare the exported policy with the trained one.
    for format in ("onnx", "torchscript"):
        assert export(str(tmp_path / "run"), format, None).exists()


@pytest.mark.parametrize(
    ("learner", "refused"),
    [
        *((learner, {"image_training": "targets"}) for learner in MEAN_ACTIONS),
        *((learner, {"image_pooling": "spatial_softmax"}) for learner in ("rsl_rl", "rl_games")),
    ],
    ids=str,
)
def test_what_a_library_does_not_have_is_refused_with_the_learners_that_have_it(learner: str, refused: dict[str, Any]):
    flag, kind = next(iter(refused)).replace("_", "-"), LEARNERS[learner]
    settings = replace(kind.settings.from_training(TRAINING), **refused)
    with pytest.raises(UserError, match=rf"{flag} .* is not supported: use .* or --learner ppo"):
        kind.make(RobotEnv(TASKS["images"], 4), settings, 0, Group(Rank()))


def test_a_task_whose_encoder_is_trained_by_regression_trains_it_by_the_policy_in_libraries():
    training = replace(TRAINING, image_training="targets")
    found = {name: asdict(kind.settings.from_training(training))["image_training"] for name, kind in LEARNERS.items()}
    assert found == dict.fromkeys(MEAN_ACTIONS, "policy") | {"ppo": "targets"}


@pytest.mark.parametrize("learner", ["skrl", "skrl_jax"])
def test_the_policy_has_the_spatial_softmax_of_the_library(learner: str):
    env, made = make(learner, TASKS["images"], image_pooling="spatial_softmax")
    obs = env.reset()
    with torch.no_grad():
        expected = MEAN_ACTIONS[learner](made, obs)
    torch.testing.assert_close(made.policy()(obs), expected, rtol=1e-4, atol=1e-7)


def test_rl_games_refuses_a_vector_beside_images():
    match = r'"policy" and front_rgb, .* together: .* use one of the learners ppo, rsl_rl'
    with pytest.raises(UserError, match=match):
        make("rl_games", TASKS["images and vector"])
