"""Pictures of what the cameras see, for the loggers, videos and the viewer."""

import torch
from torch import Tensor

from paceline.cameras.mosaic import mosaic, to_rgb
from paceline.env.vec_env import VecEnv
from paceline.learners.encoders import images_of

MAX_ENVS = 16


@torch.no_grad()
def pictures_of(env: VecEnv, num_envs: int = MAX_ENVS) -> dict[str, Tensor]:
    """Return the current images of the first envs side by side, one picture for each observation group of images, RGB
    [3, height, width], uint8 on the CPU."""
    specs = images_of(env)
    obs = env.observe() if specs else {}
    return {name: mosaic(to_rgb(obs[name][:num_envs].cpu(), spec.scale, spec.frames)) for name, spec in specs.items()}
