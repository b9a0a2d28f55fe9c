"""Ranks on a GPU: nccl inside a CUDA graph, two ranks on one GPU, device indices of torch and Warp."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.device.gpus import gpu_uuid
from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.env.robot_env import RobotEnv
from paceline.learners.ppo import Ppo
from paceline.learners.ppo.parameter_averaging import OUTER_STEP, Averaging
from paceline.learners.ppo.settings import PpoSettings
from paceline.tasks.cartpole import Cartpole
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.gpu

SMALL = PpoSettings(horizon=8, epochs=2, minibatches=2, hidden=(32, 32))


def learn(group: Group, iterations: int = 4, averaging: Averaging | None = None) -> dict[str, Any]:
    # An earlier run in this process may have lowered the precision.
    torch.set_float32_matmul_precision("highest")
    env = RobotEnv(Cartpole(), 64, "auto", group.rank.device, seed=1)
    learner = Ppo(env, SMALL, 1, group, averaging)
    for _ in range(iterations):
        learner.learn()
    return {
        "backend": group.backend,
        "captured": getattr(learner.update, "captured", False),
        "collectives": group.collectives,
        "parameters": learner.flat_parameters.values.detach().cpu(),
    }


def learn_as_rank(gpu_ids: tuple[int, ...] = (0,), averaging: Averaging | None = None) -> dict[str, Any]:
    return learn(Group(this_rank(gpu_ids)), averaging=averaging)


def test_one_rank_over_nccl_has_its_collectives_in_the_graph():
    (found,) = on_ranks(1, learn_as_rank, seconds=300.0)
    assert found["backend"] == "nccl"
    assert found["captured"]
    # The collectives are called once eagerly and once during capture; later iterations replay the graph.
    assert found["collectives"] == 2 * (SMALL.epochs * SMALL.minibatches + 1)
    single_rank = learn(Group(Rank(device=torch.device("cuda", 0))))
    torch.testing.assert_close(found["parameters"], single_rank["parameters"], rtol=1e-2, atol=1e-3)


def test_two_ranks_share_a_gpu_over_gloo_and_learn_as_one(tmp_path: Path):
    for name, argv in (("one", ["--gpu-ids", "0"]), ("two", ["--gpu-ids", "0", "0"])):
        command = [sys.executable, "-m", "paceline", "train", "cartpole", *argv, "--total-envs", "2048"]
        done = subprocess.run([*command, "--run-dir", name], cwd=tmp_path, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stderr
    assert "sharing a GPU: gradients go over gloo" in done.stdout
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    assert (one["world_size"], two["world_size"], two["total_envs"]) == (1, 2, 2048)
    assert two["mean_length"] > 0.95 * two["max_length"]
    assert two["mean_return"] == pytest.approx(one["mean_return"], rel=0.03)


@pytest.mark.parametrize(("gpu_ids", "backend"), [((0,), "nccl"), ((0, 0), "gloo")])
def test_ranks_that_average_parameters_have_a_captured_update_over_any_backend(gpu_ids: tuple[int, ...], backend: str):
    ranks = on_ranks(len(gpu_ids), learn_as_rank, gpu_ids, Averaging(2, *OUTER_STEP), seconds=300.0)
    for rank in ranks:
        assert (rank["backend"], rank["captured"], rank["collectives"]) == (backend, True, 4)
        assert torch.equal(rank["parameters"], ranks[0]["parameters"])


@pytest.mark.parametrize("mask", ["index", "uuid"])
def test_torch_and_warp_are_on_the_same_gpu_under_any_mask(mask: str):
    last = torch.cuda.device_count() - 1
    uuid = gpu_uuid(torch.device("cuda", last))
    # Put the last GPU first, so that visible indices differ from physical ones.
    others = [gpu_uuid(torch.device("cuda", index)) for index in range(last)]
    visible = [uuid, *others] if mask == "uuid" else [str(index) for index in (last, *range(last))]
    program = (
        "import torch, warp\n"
        "from paceline.device.gpus import gpu_uuid\n"
        "from paceline.tensors.graph import warp_device\n"
        "device = torch.device('cuda', 0)\n"
        "print(gpu_uuid(device), warp_device(device).uuid)\n"
    )
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(visible)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == [uuid, uuid]
