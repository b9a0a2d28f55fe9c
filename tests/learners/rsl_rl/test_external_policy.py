"""Policies that RSL-RL trained and saved, compared with their actions in RSL-RL."""

import sys
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner
from tensordict import TensorDict
from torch import Tensor, nn

from paceline.cli.main import main
from paceline.errors import UserError
from paceline.export import export
from paceline.learners.rsl_rl.external_policy import ACTIVATIONS, load_external_policy
from paceline.learners.rsl_rl.settings import RslRlSettings

INPUTS, ACTIONS = 5, 2


class Wander(VecEnv):
    """Env with observations far from normalized, and a reward for actions that follow them."""

    num_envs, num_actions, max_episode_length = 8, ACTIONS, 10
    device, cfg = "cpu", {}

    def __init__(self) -> None:
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self._generator = torch.Generator().manual_seed(0)

    def get_observations(self) -> TensorDict:
        return TensorDict(cast("Any", {"policy": observations(self.num_envs, self._generator)}), [self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        obs = self.get_observations()
        reward = -(actions - obs["policy"][:, :ACTIONS]).square().sum(1)
        return obs, reward, torch.zeros(self.num_envs, dtype=torch.long), {}


def observations(rows: int, generator: torch.Generator) -> Tensor:
    spread = torch.tensor([0.1, 3.0, 1.0, 10.0, 0.01])
    return 2.0 + spread * torch.randn(rows, INPUTS, generator=generator)


class LikeCartpole(Wander):
    """Env with the widths of the observations and actions of cartpole."""

    num_actions = 1

    def get_observations(self) -> TensorDict:
        return TensorDict(cast("Any", {"policy": torch.randn(8, 4, generator=self._generator)}), [self.num_envs])

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        return self.get_observations(), -actions[:, 0].square(), torch.zeros(8, dtype=torch.long), {}


def trained(
    activation: str = "elu", normalized: bool = True, env: type[Wander] = Wander, **actor: Any
) -> OnPolicyRunner:
    network = {"class_name": "MLPModel", "hidden_dims": [16, 8], "activation": activation}
    network["obs_normalization"] = normalized
    noise = {"class_name": "GaussianDistribution", "init_std": 1.0, "std_type": "log"}
    config = {
        "num_steps_per_env": 8,
        "save_interval": 100,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": network | {"distribution_cfg": noise} | actor,
        "critic": network,
        "algorithm": {"class_name": "PPO", "learning_rate": 0.01, "schedule": "fixed"},
    }
    torch.manual_seed(0)
    runner = OnPolicyRunner(env(), config, log_dir=None, device="cpu")
    runner.learn(3)
    return runner


@pytest.fixture(scope="module")
def runner() -> OnPolicyRunner:
    return trained()


@torch.no_grad()
def assert_acts_alike(runner: OnPolicyRunner, file: Path, activation: str = "elu") -> None:
    obs = observations(7, torch.Generator().manual_seed(1))
    expected = runner.get_inference_policy()(TensorDict(cast("Any", {"policy": obs}), [7]))
    assert expected.std() > 0.05, "actions that hardly vary would match by chance"
    found = load_external_policy(file, activation, INPUTS, ACTIONS)
    torch.testing.assert_close(found.policy({"policy": obs}), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("normalized", [True, False])
def test_a_policy_acts_as_it_does_in_rsl_rl(normalized: bool, tmp_path: Path):
    runner, file = trained(normalized=normalized), tmp_path / "model_2.pt"
    runner.save(str(file))
    assert_acts_alike(runner, file)
    assert load_external_policy(file, "elu", INPUTS, ACTIONS).iteration == 2


@pytest.mark.parametrize("activation", ["lrelu", "swish"])
def test_the_activation_is_known_by_rsl_rls_name(activation: str, tmp_path: Path):
    runner, file = trained(activation), tmp_path / "model.pt"
    runner.save(str(file))
    assert_acts_alike(runner, file, activation)
    with pytest.raises(AssertionError, match="not close"):
        assert_acts_alike(runner, file, "sigmoid")


def test_every_activation_that_training_offers_can_be_loaded():
    assert set(RslRlSettings.__dataclass_fields__["activation"].type.__args__) <= ACTIVATIONS.keys()


def older(runner: OnPolicyRunner) -> dict[str, Tensor]:
    """Return the networks in the format of version 3."""
    actor, critic = runner.alg.actor.state_dict(), runner.alg.critic.state_dict()
    renamed = {"mlp.": "{}.", "obs_normalizer.": "{}_obs_normalizer.", "distribution.log_std_param": "log_std"}
    state = {}
    for role, tensors in (("actor", actor), ("critic", critic)):
        for name, tensor in tensors.items():
            before, after = next((b, a.format(role)) for b, a in renamed.items() if name.startswith(b))
            state[after + name.removeprefix(before)] = tensor
    return state


def test_a_file_of_version_3_has_actor_and_critic_together(runner: OnPolicyRunner, tmp_path: Path):
    state = older(runner)
    assert {"actor.0.weight", "critic.0.weight", "actor_obs_normalizer._mean", "log_std"} <= state.keys()
    torch.save({"model_state_dict": state, "iter": 150, "infos": None}, tmp_path / "model.pt")
    assert_acts_alike(runner, tmp_path / "model.pt")
    assert load_external_policy(tmp_path / "model.pt", "elu", INPUTS, ACTIONS).iteration == 150


def test_a_file_of_version_2_has_a_separate_normalizer(runner: OnPolicyRunner, tmp_path: Path):
    state = older(runner)
    state["std"] = state.pop("log_std").exp()
    normalizer = {name.split(".")[1]: state.pop(name) for name in list(state) if name.startswith("actor_obs_")}
    state = {name: tensor for name, tensor in state.items() if "normalizer" not in name}
    torch.save({"model_state_dict": state, "obs_norm_state_dict": normalizer, "iter": 1}, tmp_path / "model.pt")
    assert_acts_alike(runner, tmp_path / "model.pt")


def upstream_file(layout: str, actor: nn.Sequential, mean: Tensor, std: Tensor) -> dict[str, Any]:
    """Return the content of model_N.pt as a training of Isaac Lab or mjlab writes it."""
    layers = actor.state_dict()
    normalizer = {"_mean": mean[None], "_var": std[None].square(), "_std": std[None], "count": torch.tensor(4096)}
    critic = {"0.weight": torch.ones(1, 60), "0.bias": torch.ones(1)}
    # State of Adam.
    moments = {"step": torch.tensor(9.0), "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    optimizer = {"state": {0: moments}, "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0]}]}

    def prefixed(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"{prefix}.{name}": tensor for name, tensor in state.items()}

    together = {"std": torch.ones(12)} | prefixed("actor", layers) | prefixed("critic", critic)
    if layout == "Isaac Lab with RSL-RL 2":
        privileged = {name: tensor.clone() for name, tensor in normalizer.items()}
        separate = {"obs_norm_state_dict": normalizer, "privileged_obs_norm_state_dict": privileged}
        return {"model_state_dict": together, "optimizer_state_dict": optimizer, "iter": 299, "infos": None} | separate
    if layout == "Isaac Lab with RSL-RL 3":
        state = together | prefixed("actor_obs_normalizer", normalizer) | prefixed("critic_obs_normalizer", normalizer)
        return {"model_state_dict": state, "optimizer_state_dict": optimizer, "iter": 299, "infos": None}
    state = (
        prefixed("mlp", layers) | prefixed("obs_normalizer", normalizer) | {"distribution.std_param": torch.ones(12)}
    )
    return {
        "actor_state_dict": state,
        "critic_state_dict": prefixed("mlp", critic),
        "optimizer_state_dict": optimizer,
        "iter": 299,
        "infos": {"env_state": {"common_step_counter": 7200}},
    }


@pytest.mark.parametrize("layout", ["Isaac Lab with RSL-RL 2", "Isaac Lab with RSL-RL 3", "mjlab with RSL-RL 5"])
def test_files_of_isaac_lab_and_mjlab_are_exported(layout: str, tmp_path: Path):
    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(48, 32), nn.ELU(), nn.Linear(32, 16), nn.ELU(), nn.Linear(16, 12))
    mean, std = torch.randn(48), torch.rand(48) + 0.5
    torch.save(upstream_file(layout, actor, mean, std), tmp_path / "model_299.pt")
    file = export(str(tmp_path / "model_299.pt"), "torchscript", tmp_path / "policy.pt", task="go1-velocity")
    obs = 3.0 * torch.randn(5, 48)
    with torch.no_grad():
        expected = actor((obs - mean) / (std + 1e-2))
        torch.testing.assert_close(torch.jit.load(file)(obs), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "actions", "message"),
    [
        (4, 2, "takes 5 observations, but the task gives 4: choose the --task it was trained for"),
        (5, 3, "gives 2 actions, but the task takes 3: choose the --task it was trained for"),
        (5, 1, "gives 2 numbers where the task takes 1: a policy whose noise depends"),
    ],
)
def test_a_policy_for_another_task_is_rejected_with_both_numbers(
    inputs: int, actions: int, message: str, runner: OnPolicyRunner, tmp_path: Path
):
    runner.save(str(tmp_path / "model.pt"))
    with pytest.raises(UserError, match=message):
        load_external_policy(tmp_path / "model.pt", "elu", inputs, actions)


def layers(weight: object, bias: object = torch.zeros(2)) -> dict[str, object]:
    return {"mlp.0.weight": weight, "mlp.0.bias": bias}


@pytest.mark.parametrize(
    "content",
    [
        5,
        {"actor_state_dict": 5},
        {"actor_state_dict": {}},
        {"actor_state_dict": {1: torch.zeros(2)}},
        {"actor_state_dict": layers(5)},
        {"actor_state_dict": layers(torch.zeros(2))},
        {"actor_state_dict": layers(torch.zeros(2, 5), torch.zeros(3))},
        {"actor_state_dict": layers(torch.zeros(2, 5, dtype=torch.complex64))},
        {"actor_state_dict": layers(torch.zeros(2, 5).to_sparse())},
        {"actor_state_dict": layers(torch.zeros(2, 5)), "iter": "many"},
        {"actor_state_dict": layers(torch.zeros(2, 5)), "iter": -1},
        {"actor_state_dict": layers(torch.zeros(2, 5)), "obs_norm_state_dict": [1]},
        {"actor_state_dict": layers(torch.zeros(2, 5)), "obs_norm_state_dict": {"_mean": 5}},
        # One number in the file.
        {
            "actor_state_dict": layers(torch.zeros(1, 1).expand(10**9, 5), torch.zeros(1).expand(10**9))
            | {"mlp.2.weight": torch.zeros(1, 1).expand(2, 10**9), "mlp.2.bias": torch.zeros(2)}
        },
    ],
)
def test_a_crafted_file_is_rejected_in_one_line(content: object, tmp_path: Path):
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(UserError) as caught:
        load_external_policy(tmp_path / "model.pt", "elu", INPUTS, ACTIONS)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("rnn_type", "layers"), [("gru", 1), ("lstm", 2)])
def test_a_recurrent_policy_acts_as_it_does_in_rsl_rl(rnn_type: str, layers: int, normalized: bool, tmp_path: Path):
    rnn = {"class_name": "RNNModel", "rnn_type": rnn_type, "rnn_hidden_dim": 4, "rnn_num_layers": layers}
    runner, file = trained(normalized=normalized, **rnn), tmp_path / "model.pt"
    runner.save(str(file))
    actor = runner.get_inference_policy()
    actor.reset()
    policy = load_external_policy(file, "elu", INPUTS, ACTIONS).policy
    generator, state = torch.Generator().manual_seed(1), policy.initial_state(7)
    obs = observations(7, generator)
    found, expected = list[Tensor](), list[Tensor]()
    for _ in range(5):
        obs = observations(7, generator)
        with torch.no_grad():
            expected.append(actor(TensorDict(cast("Any", {"policy": obs}), [7])))
        actions, state = policy.step({"policy": obs}, state)
        found.append(actions)
    assert torch.stack(expected).std() > 0.02
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-4, atol=1e-5)
    content = torch.load(file, weights_only=True)
    # Names before version 5.
    renamed = {"mlp.": "actor.", "obs_normalizer.": "actor_obs_normalizer.", "rnn.": "memory_a."}
    state_dict = {
        next(
            (after + name.removeprefix(before) for before, after in renamed.items() if name.startswith(before)), "std"
        ): tensor
        for name, tensor in content["actor_state_dict"].items()
    }
    torch.save({"model_state_dict": state_dict | {"memory_c.rnn.weight_ih_l0": torch.ones(1)}, "iter": 3}, file)
    older_policy = load_external_policy(file, "elu", INPUTS, ACTIONS).policy
    assert torch.equal(older_policy.step({"policy": obs}, state)[0], policy.step({"policy": obs}, state)[0])
    with pytest.raises(UserError, match="takes 5 observations, but the task gives 6"):
        load_external_policy(file, "elu", INPUTS + 1, ACTIONS)


def layer(rows: int, columns: int, index: int) -> dict[str, Tensor]:
    return {f"actor.{index}.weight": torch.zeros(rows, columns), f"actor.{index}.bias": torch.zeros(rows)}


WHOLE, ANY = layer(3, INPUTS, 0) | layer(ACTIONS, 3, 2), torch.zeros(1)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (WHOLE | {"memory_a.rnn.weight_ih_l0": ANY}, "holds weight_ih_l0, which are not those of an LSTM or a GRU"),
        (
            WHOLE | {f"memory_a.rnn.{name}": part for name, part in nn.GRU(INPUTS, 4).state_dict().items()},
            "is damaged: its layers take 5 numbers from 4 of a recurrent network",
        ),
        (WHOLE | {"actor_cnns.camera.0.weight": ANY}, r"holds a convolutional network \(actor_cnns"),
        ({"student.0.weight": ANY}, r"holds a student of a distillation \(student"),
        (WHOLE | {"estimator.0.weight": ANY}, "holds estimator.0.weight, which is not of a multi-layer perceptron"),
        (WHOLE | {"actor.1.weight": ANY}, "not a plain multi-layer perceptron"),
        (layer(ACTIONS, INPUTS, 4), "not a plain multi-layer perceptron"),
        ({"std": ANY}, "holds no layers"),
        (layer(3, INPUTS, 0) | layer(ACTIONS, 4, 2), r"the shapes of its layers, \(3, 5\), \(2, 4\), do not match"),
        (WHOLE | {"actor_obs_normalizer._mean": torch.zeros(1, 9)}, "it has 9 means and 0 standard deviations for 5"),
    ],
)
def test_another_network_is_rejected_with_its_kind(state: dict[str, Tensor], message: str, tmp_path: Path):
    torch.save({"model_state_dict": WHOLE}, tmp_path / "whole.pt")
    load_external_policy(tmp_path / "whole.pt", "elu", INPUTS, ACTIONS)
    torch.save({"model_state_dict": state}, tmp_path / "model.pt")
    with pytest.raises(UserError, match=message):
        load_external_policy(tmp_path / "model.pt", "elu", INPUTS, ACTIONS)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"weights": 1}, "is not a policy of RSL-RL: .*; its keys are weights"),
        ([1, 2], "is not a policy of RSL-RL: .*; it holds no keys"),
        (nn.Linear(1, 1), "is not a checkpoint of tensors and numbers only"),
    ],
)
def test_a_file_of_something_else_is_rejected(content: Any, message: str, tmp_path: Path):
    torch.save(content, tmp_path / "model.pt")
    with pytest.raises(UserError, match=message) as error:
        load_external_policy(tmp_path / "model.pt", "elu", INPUTS, ACTIONS)
    assert len(str(error.value).splitlines()) == 1


def test_an_exported_policy_is_rejected(tmp_path: Path):
    torch.jit.save(torch.jit.trace(nn.Linear(1, 1), torch.zeros(1, 1)), tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"is not a checkpoint of tensors and numbers only.*TorchScript"):
        load_external_policy(tmp_path / "model.pt", "elu", INPUTS, ACTIONS)


@pytest.mark.parametrize("content", [b"", b"words", b"PK\x03\x04 a broken archive"])
def test_a_damaged_file_is_rejected_in_one_line(content: bytes, tmp_path: Path):
    (tmp_path / "model.pt").write_bytes(content)
    with pytest.raises(UserError, match=r"model.pt is not a checkpoint") as error:
        load_external_policy(tmp_path / "model.pt", "elu", INPUTS, ACTIONS)
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_file_and_an_unknown_activation_are_rejected(tmp_path: Path):
    with pytest.raises(UserError, match=r"cannot read the policy .*model.pt: No such file"):
        load_external_policy(tmp_path / "model.pt", "elu", INPUTS, ACTIONS)
    with pytest.raises(UserError, match="unknown activation 'ellu': did you mean 'elu'"):
        load_external_policy(tmp_path / "model.pt", "ellu", INPUTS, ACTIONS)


def test_the_command_line_exports_plays_and_evaluates_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    runner = trained(env=LikeCartpole)
    runner.save(str(tmp_path / "model_2.pt"))
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)

    def paceline(*argv: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *argv])
        code = main()
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    assert paceline("export", "model_2.pt", "--task", "cartpole", "--format", "torchscript", "--output", "p.pt")[0] == 0
    obs = torch.randn(6, 4)
    policy = runner.get_inference_policy()
    with torch.inference_mode():
        expected = policy(TensorDict(cast("Any", {"policy": obs}), [6]))
    torch.testing.assert_close(torch.jit.load("p.pt")(obs), expected, rtol=1e-4, atol=1e-5)
    code, message = paceline("play", "model_2.pt", "--task", "cartpole", "--seconds", "0.2", "--video", "v.mp4")
    assert (code, (tmp_path / "v.mp4").exists()) == (0, True), message
    code, message = paceline("eval", "model_2.pt", "--task", "cartpole", "--episodes", "4")
    assert (code, len(list((tmp_path / "eval").iterdir()))) == (0, 1), message
    code, message = paceline("play", "model_2.pt", "--seconds", "0.2")
    assert code == 2
    assert "give its --task" in message
