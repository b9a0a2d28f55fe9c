"""PPO on images: encoders, networks of the groups, and the policy."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState
from paceline.env.vec_env import TensorSpec
from paceline.errors import UserError
from paceline.learners.encoders import ImageEncoder, SpatialSoftmax, blocks_to_channels
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.image_regression import ImageRegression
from paceline.learners.ppo.settings import PpoSettings
from paceline.tensors.statistics import RunningStatistics
from tests.cameras.small import SMALL_CAMERA, SMALL_ENCODER
from tests.cameras.test_tiled_camera import SmallTask

SETTINGS = PpoSettings(
    horizon=4,
    epochs=1,
    minibatches=2,
    hidden=(16,),
    **SMALL_ENCODER,
)


def make_encoder(**specs: TensorSpec) -> ImageEncoder:
    return ImageEncoder(specs, (4,), (3,), (2,), 8, "flatten", torch.Generator().manual_seed(0))


def test_spatial_softmax_finds_the_position_of_a_peak() -> None:
    maps = torch.zeros(1, 2, 5, 9)
    maps[0, 0, 0, 8] = maps[0, 1, 4, 0] = 100.0
    assert torch.allclose(SpatialSoftmax()(maps), torch.tensor([[1.0, -1.0, -1.0, 1.0]]), atol=1e-3)


@pytest.mark.parametrize(("kernel", "stride", "size"), [(8, 4, 20), (6, 3, 20), (4, 2, 9)])
def test_a_convolution_of_blocks_of_pixels_is_that_of_the_pixels(kernel: int, stride: int, size: int) -> None:
    x, weight = torch.randn(2, 3, size, size + 1), torch.randn(5, 3, kernel, kernel)
    expected = functional.conv2d(x, weight, stride=stride)
    found = functional.conv2d(blocks_to_channels(x, stride), blocks_to_channels(weight, stride))
    assert torch.allclose(found, expected, atol=1e-4)


def test_encoder_scales_bytes_depth_and_classes() -> None:
    encoder = make_encoder(
        rgb=TensorSpec((3, 8, 8), torch.uint8),
        depth=TensorSpec((1, 8, 8), torch.float16, scale=4.0),
        classes=TensorSpec((1, 8, 8), torch.uint8, classes=3),
    )
    assert encoder.layers[0].in_channels == 3 + 1 + 3
    rows = {"rgb": torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8), "classes": torch.zeros(2, 1, 8, 8).byte()}
    near = encoder(rows | {"depth": torch.ones(2, 1, 8, 8).half()})
    assert near.dtype == torch.float32
    assert not torch.equal(near, encoder(rows | {"depth": torch.full((2, 1, 8, 8), 3.0).half()}))


def test_encoder_refuses_what_it_cannot_use() -> None:
    with pytest.raises(UserError, match="use the stream classes"):
        make_encoder(ids=TensorSpec((1, 8, 8), torch.int32))
    with pytest.raises(UserError, match="different sizes"):
        make_encoder(one=TensorSpec((3, 8, 8), torch.uint8), two=TensorSpec((3, 16, 8), torch.uint8))
    with pytest.raises(UserError, match=r"smaller than the kernels .* larger images or smaller strides"):
        ImageEncoder(
            {"rgb": TensorSpec((3, 8, 8), torch.uint8)}, (4, 4), (8, 4), (4, 2), 8, "flatten", torch.Generator()
        )


class ImageOnlyTask(SmallTask):
    def observe(self, state):
        return {}


@pytest.mark.parametrize("task", [SmallTask, ImageOnlyTask], ids=["critic vector", "images only"])
@pytest.mark.parametrize("pooling", ["flatten", "spatial_softmax"])
def test_an_update_changes_encoder_actor_and_critic(task: type[SmallTask], pooling: str) -> None:
    env = RobotEnv(task(camera=replace(SMALL_CAMERA, streams=("rgb", "depth"))), 4)
    learner = Ppo(env, replace(SETTINGS, image_pooling=pooling), seed=0)
    assert learner.encoder is not None
    modules = {"encoder": learner.encoder, "actor": learner.actor, "critic": learner.critic}
    before = {name: [p.detach().clone() for p in module.parameters()] for name, module in modules.items()}
    metrics = learner.learn()
    assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    for name, module in modules.items():
        assert any(not torch.equal(p, old) for p, old in zip(module.parameters(), before[name], strict=True)), name


def test_policy_takes_images_and_gives_the_mean_action() -> None:
    env = RobotEnv(SmallTask(), 4)
    learner = Ppo(env, SETTINGS, seed=0)
    learner.learn()
    obs, policy = env.observe(), learner.policy()
    assert learner.encoder is not None
    assert policy.groups == ("front_rgb",)
    with torch.no_grad():
        expected = learner.actor(learner.encoder(obs))
    assert torch.allclose(policy(obs), expected, atol=1e-6)


def test_images_of_a_rollout_are_those_the_env_showed() -> None:
    env, same = RobotEnv(SmallTask(), 2, seed=3), RobotEnv(SmallTask(), 2, seed=3)
    learner = Ppo(env, SETTINGS, seed=0)
    learner.learn()
    images = learner.rollout.obs["front_rgb"]
    assert torch.equal(images[0], same.reset()["front_rgb"].permute(0, 2, 3, 1))
    for step, action in enumerate(learner.rollout.action, start=1):
        assert torch.equal(images[step], same.step(action).obs["front_rgb"].permute(0, 2, 3, 1))


class RegressionTask(SmallTask):
    def observe(self, state: EnvState) -> dict[str, torch.Tensor]:
        return super().observe(state) | {"policy": state.qvel, "image_targets": state.qpos}


def make_regression() -> Ppo:
    settings = replace(SETTINGS, image_training="targets", horizon=4)
    return Ppo(RobotEnv(RegressionTask(), 4), settings, seed=0)


def test_regression_trains_the_encoder_to_predict_the_targets() -> None:
    encoder = ImageEncoder(
        {"rgb": TensorSpec((3, 16, 16), torch.uint8)}, (8,), (4,), (4,), 32, "flatten", torch.Generator(), outputs=2
    )
    statistics = RunningStatistics(2, torch.device("cpu"))
    regression = ImageRegression(encoder, statistics, 3e-3, Group(Rank()), share=1.0)
    generator = torch.Generator().manual_seed(0)
    errors = []
    for _ in range(80):
        # A bright square of 4x4 pixels; the targets are its row and column, which are up to 12.
        places = torch.randint(13, (64, 2), generator=generator)
        images = torch.zeros(64, 16, 16, 3, dtype=torch.uint8)
        for image, (row, column) in zip(images, places.tolist(), strict=True):
            image[row : row + 4, column : column + 4] = 255
        statistics.merge(statistics.sums(places.float()))
        errors.append(regression.train({"rgb": images}, places.float(), [torch.arange(64)])[1].item())
    assert errors[0] > 3.0
    assert errors[-1] < 1.0


def test_the_policy_observes_the_predictions() -> None:
    learner = make_regression()
    learner.learn()
    learner.learn()
    obs, policy = learner.env.observe(), learner.policy()
    assert learner.encoder is not None
    assert policy.groups == ("policy", "front_rgb")
    with torch.no_grad():
        vector = learner.normalizers["policy"].normalize(obs["policy"])
        expected = learner.actor(torch.cat((learner.encoder(obs), vector), dim=1))
        assert torch.allclose(policy(obs), expected, atol=1e-5)


def test_another_learning_rate_of_the_regression_takes_effect_on_resume() -> None:
    first = make_regression()
    first.learn()
    state, networks = first.state(), []
    for rate in (first.config.image_learning_rate, 1e-6):
        learner = Ppo(RobotEnv(RegressionTask(), 4), replace(first.config, image_learning_rate=rate), seed=0)
        learner.load_state(state)
        learner.learn()
        networks.append(learner.state()["networks"])
    name = "encoder.layers.0.weight"
    changes = [(each[name] - state["networks"][name]).abs().max() for each in networks]
    assert changes[1] < 0.01 * changes[0]
    assert torch.equal(networks[0]["actor.0.bias"], networks[1]["actor.0.bias"])


def test_regression_needs_targets() -> None:
    with pytest.raises(UserError, match="no observation group image_targets, policy; use"):
        Ppo(RobotEnv(SmallTask(), 2), replace(SETTINGS, image_training="targets"), seed=0)
