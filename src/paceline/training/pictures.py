"""Pictures of what the cameras see during training, for the logger."""

import torch
from torch import Tensor

from paceline.cameras.mosaic import mosaic, to_rgb
from paceline.env.vec_env import VecEnv

MAX_ENVS = 16


@torch.no_grad()
def pictures_of(env: VecEnv) -> dict[str, Tensor]:
    """Return the current images of the first envs side by side, one picture for each observation group of images, RGB
    [3, height, width], uint8 on the CPU."""
    specs = {name: spec for name, spec in env.observation_spec.items() if len(spec.shape) == 3}
    obs = env.observe() if specs else {}
    return {name: mosaic(to_rgb(obs[name][:MAX_ENVS].cpu(), spec.scale, spec.frames)) for name, spec in specs.items()}
