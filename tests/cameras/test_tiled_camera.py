"""Cameras of an env: update rate, fresh images after a reset, stacked frames, latency and sensor effects."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.cameras.camera import Camera, SensorEffects
from paceline.env.randomization import Randomization
from paceline.env.robot_env import RobotEnv
from paceline.env.task import EnvState, ResetState
from paceline.errors import UserError
from paceline.tasks.cartpole_camera import CartpoleCamera
from tests.cameras.small import SMALL_CAMERA


@dataclass(frozen=True)
class SmallTask(CartpoleCamera):
    """Cartpole with a small camera, and a vector for the critic."""

    camera: Camera = field(default=SMALL_CAMERA)

    def observe(self, state: EnvState) -> dict[str, Tensor]:
        return {"critic": torch.cat((state.qpos, state.qvel), dim=1)}


def make_env(num_envs: int = 3, **options: Any) -> RobotEnv:
    effects = options.pop("effects", SensorEffects())
    env = RobotEnv(SmallTask(camera=replace(SMALL_CAMERA, effects=effects, **options)), num_envs, seed=5)
    env.reset()
    return env


def push(env: RobotEnv, steps: int = 1) -> list[dict[str, Tensor]]:
    """Step with full force, so that every image differs; return copies of the observations."""
    observations = []
    for _ in range(steps):
        obs = env.step(torch.ones(env.num_envs, 1)).obs
        observations.append({name: rows.clone() for name, rows in obs.items()})
    return observations


def test_groups_have_the_formats_of_their_streams() -> None:
    env = make_env(streams=("rgb", "depth", "segmentation"), frames=2)
    spec = {name: (each.shape, each.dtype) for name, each in env.observation_spec.items()}
    assert spec["front_rgb"] == ((6, 16, 24), torch.uint8)
    assert spec["front_depth"] == ((2, 16, 24), torch.float16)
    assert spec["front_segmentation"] == ((2, 16, 24), torch.int32)
    assert env.observation_spec["front_depth"].scale == SMALL_CAMERA.far
    for name, obs in push(env)[0].items():
        assert env.observation_spec[name].shape == tuple(obs.shape[1:])
        if obs.dim() == 4:
            assert obs.is_contiguous(memory_format=torch.channels_last)


def test_slow_camera_keeps_its_image_but_a_reset_env_gets_a_new_one() -> None:
    env = make_env(every=3)
    first = env.observe()["front_rgb"].clone()
    one, two, three = (obs["front_rgb"] for obs in push(env, 3))
    assert torch.equal(one, first)
    assert torch.equal(two, first)
    assert not torch.equal(three, first)
    env.env_state.episode_step[1] = env.max_episode_steps - 1
    after = push(env)[0]["front_rgb"]
    assert torch.equal(after[[0, 2]], three[[0, 2]])
    assert not torch.equal(after[1], three[1])


def test_rate_is_a_number_of_control_steps() -> None:
    control_rate = 1.0 / make_env().step_seconds
    for slow in (make_env(rate=control_rate / 3.0), make_env(rate=1.003 * control_rate / 3.0)):
        every, rate = push(make_env(every=3), 7), push(slow, 7)
        assert all(torch.equal(one["front_rgb"], other["front_rgb"]) for one, other in zip(every, rate, strict=True))


def test_rates_that_do_not_divide_the_control_rate_are_refused() -> None:
    # The control rate of cartpole is 60 Hz.
    with pytest.raises(UserError, match=r"'front': rate 25 Hz .* control rate of 60 Hz: choose 20 or 30"):
        make_env(rate=25.0)
    with pytest.raises(UserError, match=r"rate 70 Hz .* control rate of 60 Hz: choose 60"):
        make_env(rate=70.0)
    with pytest.raises(UserError, match="every 2 and rate 30 exclude each other"):
        make_env(every=2, rate=30.0)


def test_frames_are_stacked_newest_last_and_start_with_the_first_image() -> None:
    env = make_env(frames=2)
    start = env.observe()["front_rgb"]
    assert torch.equal(start[:, :3], start[:, 3:])
    one, two = (obs["front_rgb"] for obs in push(env, 2))
    assert torch.equal(two[:, :3], one[:, 3:])
    assert not torch.equal(two[:, :3], two[:, 3:])


def test_latency_delays_images_by_control_steps() -> None:
    plain, late = make_env(), make_env(effects=SensorEffects(latency=(2, 2)))
    now, delayed = push(plain, 5), push(late, 5)
    for step in range(2, 5):
        assert torch.equal(delayed[step]["front_rgb"], now[step - 2]["front_rgb"])


def test_noise_depends_on_seed_env_and_step_only() -> None:
    effects = SensorEffects(depth_noise=0.01, depth_dropout=0.1, rgb_noise=5.0)
    clean, noisy = (make_env(4, streams=("rgb", "depth"), effects=each) for each in (SensorEffects(), effects))
    again = make_env(4, streams=("rgb", "depth"), effects=effects)
    clean, noisy, again = push(clean)[0], push(noisy)[0], push(again)[0]
    assert torch.equal(noisy["front_rgb"], again["front_rgb"])
    assert torch.equal(noisy["front_depth"], again["front_depth"])
    color_error = (noisy["front_rgb"].float() - clean["front_rgb"].float()).flatten()
    assert 4.0 < color_error.std() < 6.0
    hit = clean["front_depth"] < SMALL_CAMERA.far
    dropped = (noisy["front_depth"] == SMALL_CAMERA.far) & hit
    assert 0.05 < float(dropped.sum() / hit.sum()) < 0.2
    kept = hit & ~dropped
    relative = ((noisy["front_depth"] - clean["front_depth"]).float() / clean["front_depth"].float().square())[kept]
    assert 0.007 < relative.std() < 0.013
    assert (noisy["front_depth"][~hit] == SMALL_CAMERA.far).all()


@pytest.mark.parametrize(
    "options",
    [{}, {"every": 3}, {"frames": 3}, {"effects": SensorEffects(rgb_noise=3.0, latency=(0, 3))}],
    ids=["plain", "every", "frames", "effects"],
)
def test_restored_env_continues_with_the_same_images(options: dict[str, Any]) -> None:
    env, restored = make_env(**options), make_env(**options)
    last = push(env, 4)[-1]
    restored.load_state(env.state())
    assert all(torch.equal(rows, last[name]) for name, rows in restored.observe().items())
    for one, other in zip(push(env, 4), push(restored, 4), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_images_that_can_be_rendered_again_are_not_saved() -> None:
    assert not any("front" in name for name in make_env().state())
    assert any("front" in name for name in make_env(every=2).state())


def test_task_without_the_camera_in_its_model_is_refused() -> None:
    @dataclass(frozen=True)
    class Misnamed(SmallTask):
        def cameras(self) -> dict[str, Camera]:
            return {"fornt": self.camera}

        def model(self) -> Any:
            return SmallTask(camera=self.camera).model()

    with pytest.raises(UserError, match=r"fornt.*front"):
        RobotEnv(Misnamed(), 1)


def test_contradicting_options_are_refused() -> None:
    with pytest.raises(UserError, match=r"near 5 must be below far 2"):
        make_env(near=5.0, far=2.0)
    with pytest.raises(UserError, match="at least one, each once"):
        make_env(streams=("rgb", "rgb"))


@dataclass(frozen=True)
class Randomized(SmallTask):
    """Cartpole whose camera, colors and lights differ between envs."""

    def randomized_fields(self) -> tuple[Randomization, ...]:
        return (
            Randomization("cam_pos", -0.2, 0.2, names="front", how="add"),
            Randomization("cam_fovy", 0.9, 1.1, names="front"),
            Randomization("geom_rgba", 0.5, 1.0, names="cart|pole"),
            Randomization("light_diffuse", 0.5, 1.5),
            Randomization("light_dir", -0.2, 0.2, how="add"),
        )

    def reset(self, state: EnvState, uniform: Tensor) -> ResetState:
        # All envs start in the same state.
        return super().reset(state, torch.full_like(uniform, 0.6))


def test_pose_intrinsics_colors_and_lights_are_randomized_for_any_number_of_ranks() -> None:
    together = RobotEnv(Randomized(), 4, seed=9).reset()["front_rgb"]
    assert len({tuple(image.flatten().tolist()) for image in together}) == 4
    apart = RobotEnv(Randomized(), 2, seed=9, first_env=2).reset()["front_rgb"]
    assert torch.equal(apart, together[2:])


def test_two_cameras_do_not_share_their_noise() -> None:
    @dataclass(frozen=True)
    class TwoCameras(SmallTask):
        def cameras(self) -> dict[str, Camera]:
            noise = SensorEffects(depth_noise=0.01, rgb_noise=5.0)
            many = replace(self.camera, streams=("depth", "rgb"), effects=noise)
            return {"front": many, "track": replace(many, streams=("rgb",))}

    obs = RobotEnv(TwoCameras(), 1, seed=5).reset()
    # Both cameras have the same pose, so their images differ by the difference of two independent noises.
    difference = obs["front_rgb"].float() - obs["track_rgb"].float()
    assert 5.5 < difference.std() < 8.5
