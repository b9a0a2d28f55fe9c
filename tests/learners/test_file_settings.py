"""Settings that configuration files of the libraries have and tasks do not: they take effect, and a run with them
resumes and runs on several ranks."""

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
import yaml
from gymnasium.spaces import Box, Dict
from skrl.utils.model_instantiators.torch import shared_model
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.rank import Rank, this_rank
from paceline.distributed.sharding import shard_ranges
from paceline.env.robot_env import RobotEnv
from paceline.env.vec_env import Step, TensorSpec
from paceline.errors import UserError
from paceline.learners.learner import LEARNERS, Learner
from paceline.learners.networks import Policy
from paceline.learners.rl_games.settings import RlGamesSettings
from paceline.learners.rsl_rl.settings import RslRlSettings
from paceline.learners.settings import Settings
from paceline.learners.skrl.network_parts import parse_parts
from paceline.learners.skrl.settings import SkrlSettings
from paceline.tasks.cartpole import Cartpole
from tests.distributed.ranks import on_ranks
from tests.states import flat

RSL_RL = RslRlSettings(num_steps_per_env=8, hidden_dims=(16,), num_learning_epochs=2)
RL_GAMES = RlGamesSettings(horizon_length=8, minibatch_size_per_env=4, mini_epochs=2, units=(16,))
SKRL = SkrlSettings(rollouts=8, learning_epochs=2, mini_batches=2, layers=(16,), observation_normalization=True)
PARTS = [
    {"name": "pos", "input": 'OBSERVATIONS["positions"]', "layers": [16, 8], "activations": "elu"},
    {"name": "vel", "input": "OBSERVATIONS[1]", "layers": [{"linear": 8}], "activations": ["tanh"]},
    {"name": "both", "input": "concatenate([pos + vel, pos * vel])", "layers": [12, 4], "activations": ["relu", None]},
    {"name": "net", "input": "both - both * both", "layers": [], "activations": []},
]
RECURRENT_PART = {"name": "memory", "input": "net", "type": "LSTM", "layers": [8], "num_layers": 2}
IMAGE_PARTS = [
    {
        "name": "features",
        "input": 'permute(OBSERVATIONS["camera"], (0, 3, 1, 2))',
        "layers": [{"conv2d": {"out_channels": 4, "kernel_size": 4, "stride": 2, "padding": 0}}, "flatten", 8],
        "activations": "relu",
    },
    {
        "name": "net",
        "input": 'concatenate([features, OBSERVATIONS["velocities"]])',
        "layers": [8],
        "activations": "elu",
    },
]
CASES: dict[str, tuple[str, Settings, tuple[str, ...]]] = {
    "rsl_rl": (
        "rsl_rl",
        dataclasses.replace(
            RSL_RL, state_dependent_std=True, critic_hidden_dims=(8, 8), clip_actions=0.1, use_mixed_precision=True
        ),
        ("policy",),
    ),
    "rsl_rl recurrent": (
        "rsl_rl",
        dataclasses.replace(
            RSL_RL,
            rnn_type="lstm",
            rnn_hidden_dim=8,
            num_mini_batches=2,
            state_dependent_std=True,
            critic_hidden_dims=(8, 8),
            clip_actions=0.1,
            use_mixed_precision=True,
        ),
        ("policy",),
    ),
    "rl_games recurrent": (
        "rl_games",
        dataclasses.replace(
            RL_GAMES,
            rnn_name="gru",
            rnn_units=8,
            rnn_concat_input=True,
            fixed_sigma=False,
            action_limit=0.1,
            clip_observations=0.05,
            central_value_units=(12,),
            central_value_minibatch_size_per_env=8,
        ),
        ("policy", "critic"),
    ),
    "rl_games": (
        "rl_games",
        dataclasses.replace(RL_GAMES, fixed_sigma=False, action_limit=0.1, clip_observations=0.05),
        ("policy",),
    ),
    "rl_games central": (
        "rl_games",
        dataclasses.replace(
            RL_GAMES,
            clip_actions=True,
            central_value_units=(24, 12),
            central_value_learning_rate=1e-5,
            central_value_mini_epochs=3,
            central_value_minibatch_size_per_env=8,
            central_value_normalize_input=False,
        ),
        ("policy", "critic"),
    ),
    "skrl shared": ("skrl", dataclasses.replace(SKRL, separate=False, grad_norm_clip=0.0), ("policy",)),
    "skrl mixed": (
        "skrl",
        dataclasses.replace(SKRL, mixed_precision=True, fixed_log_std=True, value_layers=(8, 8)),
        ("policy",),
    ),
    "skrl parts": (
        "skrl",
        dataclasses.replace(SKRL, separate=False, network=yaml.safe_dump(PARTS)),
        ("positions", "velocities"),
    ),
    "skrl recurrent": (
        "skrl",
        dataclasses.replace(
            SKRL, separate=False, mixed_precision=True, network=yaml.safe_dump([*PARTS, RECURRENT_PART])
        ),
        ("positions", "velocities"),
    ),
    "skrl image parts": (
        "skrl",
        dataclasses.replace(SKRL, network=yaml.safe_dump(IMAGE_PARTS)),
        ("camera", "velocities"),
    ),
    "skrl_jax": ("skrl_jax", dataclasses.replace(SKRL, fixed_log_std=True, value_layers=(8, 8)), ("policy",)),
}
IMAGE = TensorSpec((3, 12, 10), torch.uint8)


class Grouped:
    """Cartpole with other observation groups."""

    def __init__(self, envs: range, groups: tuple[str, ...]):
        self._env = RobotEnv(Cartpole(episode_seconds=0.2), len(envs), seed=3, first_env=envs.start)
        self._groups, self.actions = groups, list[Tensor]()
        widths = {"policy": 4, "critic": 4, "positions": 2, "velocities": 2}
        self.observation_spec = {name: IMAGE if name == "camera" else TensorSpec((widths[name],)) for name in groups}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._env, name)

    def reset(self) -> dict[str, Tensor]:
        return self._grouped(self._env.reset())

    def observe(self) -> dict[str, Tensor]:
        return self._grouped(self._env.observe())

    def step(self, actions: Tensor) -> Step:
        self.actions.append(actions.clone())
        step = self._env.step(actions)
        final = self._grouped(step.final_obs)
        final.pop("camera", None)
        return dataclasses.replace(step, obs=self._grouped(step.obs), final_obs=final)

    def _grouped(self, obs: dict[str, Tensor]) -> dict[str, Tensor]:
        x = obs["policy"]
        image = (x.sum(1).view(-1, 1, 1, 1) * torch.arange(360).view(IMAGE.shape)).sin().mul(99).add(100).byte()
        found = {"policy": x, "critic": 2.0 * x, "positions": x[:, :2], "velocities": x[:, 2:], "camera": image}
        return {name: found[name].clone() for name in self._groups}


def make(case: str, group: Group | None = None, num_envs: int = 6, **changes: Any) -> tuple[Any, Any]:
    learner, settings, groups = CASES[case]
    group = group or Group(Rank())
    env: Any = Grouped(shard_ranges(num_envs, group.size)[group.rank.index], groups)
    return env, LEARNERS[learner].make(env, dataclasses.replace(settings, **changes), 3, group)  # pyright: ignore[reportArgumentType]


def assert_same(one: Learner, other: Learner) -> None:
    states = flat(one.state()), flat(other.state())
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][name])), name


@pytest.mark.parametrize("case", CASES)
def test_a_run_learns_and_a_resumed_one_equals_it(case: str):
    (env, whole), (_, resumed) = make(case), make(case)
    before = flat(whole.state()["networks"])
    metrics = whole.learn()
    assert all(torch.tensor(value).isfinite() for value in metrics.values())
    after = flat(whole.state()["networks"])
    changed = [name for name, value in after.items() if not torch.equal(value, before[name])]
    assert sum("weight" in name or "kernel" in name for name in changed) >= 3
    resumed.load_state(whole.state())
    assert_same(whole, resumed)
    assert reduced(whole.learn()) == reduced(resumed.learn())
    assert_same(whole, resumed)
    policy: Policy = whole.policy()
    actions = policy(env.observe())
    assert actions.shape == (6, 1)
    with warnings.catch_warnings():
        # Comparisons of shapes.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # pyright: ignore[reportPrivateImportUsage]
        traced: Any = torch.jit.trace(policy, (env.observe(),), strict=False)
    torch.testing.assert_close(traced(env.observe()), actions)


def reduced(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("seconds/")}


def learn_on_ranks() -> dict[str, Any]:
    torch.set_num_threads(1)
    group = Group(this_rank(()))
    found = dict[str, Any]()
    recurrent = ("rsl_rl recurrent", "rl_games recurrent", "skrl recurrent")
    for case in (*recurrent, "rl_games central", "skrl shared", "skrl mixed"):
        _, learner = make(case, group, num_envs=5)
        learner.learn()
        learner.learn()
        found[case] = {name: part for name, part in learner.state().items() if name != "envs"}
    group.close()
    return flat(found)


def test_ranks_have_the_same_networks():
    one, other = on_ranks(2, learn_on_ranks)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other[name])), name


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        *(("rsl_rl", 0.1), ("rsl_rl recurrent", 0.1)),
        *(("rl_games", 0.1), ("rl_games recurrent", 0.1), ("rl_games central", 1.0)),
    ],
)
def test_actions_are_clipped_in_the_env_and_in_the_policy(case: str, limit: float):
    env, learner = make(case)
    learner.learn()
    assert torch.cat(env.actions).abs().max() == pytest.approx(limit)
    far = {"policy": torch.tensor([[100.0, -100.0, 100.0, 100.0], [-100.0, 100.0, -100.0, -100.0]])}
    assert learner.policy()(far).abs().max() <= limit


@pytest.mark.parametrize("std_type", ["scalar", "log"])
def test_a_standard_deviation_of_rsl_rl_may_be_constant_and_has_a_range(std_type: str):
    common: dict[str, Any] = {"state_dependent_std": False, "init_std": 0.5, "std_type": std_type}
    for maximum, expected in ((1.0, 0.5), (0.25, 0.25)):
        _, learner = make("rsl_rl", learn_std=False, std_range=(0.0, maximum), **common)
        assert [learner.learn()["policy/std"] for _ in range(2)] == pytest.approx([expected] * 2)
    _, learner = make("rsl_rl", **common)
    assert learner.learn()["policy/std"] != pytest.approx(0.5, abs=1e-6)


def test_rl_games_scales_actions_from_one_to_the_limit():
    env, learner = make("rl_games", clip_actions=True, action_limit=3.0)
    learner.learn()
    assert torch.cat(env.actions).abs().max() == pytest.approx(3.0)
    actor, obs = learner.policy(), env.observe()
    plain = LEARNERS["rl_games"].make(
        env, dataclasses.replace(learner.config, clip_actions=False, action_limit=None), 3, Group(Rank())
    )
    plain.load_policy(learner.state())
    torch.testing.assert_close(actor(obs), 3.0 * plain.policy()(obs).clamp(-1.0, 1.0))


def test_rl_games_starts_with_the_standard_deviation_of_the_file():
    _, learner = make("rl_games", fixed_sigma=True, sigma_init_val=-1.5, learning_rate=1e-9, lr_schedule="none")
    assert learner.learn()["policy/std"] == pytest.approx(math.exp(-1.5), rel=1e-4)


def test_rl_games_clips_observations_in_training_and_in_the_policy():
    _, learner = make("rl_games", normalize_input=False)
    learner.learn()
    assert learner.agent.dataset.values_dict["obs"].abs().max() == pytest.approx(0.05)
    policy = learner.policy()
    assert torch.equal(policy({"policy": torch.full((1, 4), 9.0)}), policy({"policy": torch.full((1, 4), 0.05)}))


def test_a_central_value_network_of_rl_games_is_trained_with_its_own_settings():
    _, learner = make("rl_games central")
    central = learner.agent.central_value_net
    shapes = [tuple(p.shape) for name, p in central.model.named_parameters() if name.endswith("weight")]
    assert shapes[:2] == [(24, 4), (12, 24)]
    assert (central.mini_epoch, central.num_minibatches, central.normalize_input) == (3, 1, False)
    assert central.optimizer.param_groups[0]["lr"] == 1e-5
    learner.learn()
    assert central.optimizer.param_groups[0]["lr"] == 1e-5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 1e-2),
        ("lr_schedule", "linear"),
        ("mini_epochs", 1),
        ("minibatch_size_per_env", 2),
        ("clip_value", False),
        ("truncate_grads", False),
    ],
)
def test_a_setting_of_the_central_value_network_that_changes_on_resume_takes_effect(name: str, value: Any):
    clipped = {"grad_norm": 1e-3, "e_clip": 1e-4, "max_epochs": 5}
    (_, first), (_, same) = make("rl_games central", **clipped), make("rl_games central", **clipped)
    _, changed = make("rl_games central", **clipped, **{f"central_value_{name}": value})
    first.learn()
    for learner in (same, changed):
        learner.load_state(first.state())
        learner.learn()
        learner.learn()
    states = (flat(learner.state()["networks"]["central_value"]) for learner in (same, changed))
    one, other = states
    assert any(not torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_a_constant_standard_deviation_does_not_change():
    for case in ("skrl mixed", "skrl_jax"):
        _, learner = make(case, initial_log_std=-0.5)
        assert learner.learn()["policy/std"] == pytest.approx(0.6065, abs=1e-4)
        assert learner.learn()["policy/std"] == pytest.approx(0.6065, abs=1e-4)


def test_mixed_precision_changes_the_update_a_little():
    for case, name in (("rsl_rl", "use_mixed_precision"), ("skrl mixed", "mixed_precision")):
        one, other = (flat(_learned(case, **{name: on})["networks"]) for on in (True, False))
        differences = [(one[key] - other[key]).abs().max() for key in one if "weight" in key]
        assert 0.0 < max(differences) < 0.05


def _learned(case: str, **changes: Any) -> dict[str, Any]:
    _, learner = make(case, **changes)
    learner.learn()
    return learner.state()


@pytest.mark.parametrize(
    ("case", "network", "space"),
    [
        (
            "skrl shared",
            [{"name": "net", "input": "OBSERVATIONS", "layers": [16], "activations": "elu"}],
            Box(-1, 1, (4,)),
        ),
        ("skrl parts", PARTS, Dict({"positions": Box(-1, 1, (2,)), "velocities": Box(-1, 1, (2,))})),
    ],
)
def test_a_shared_network_is_that_of_skrl(case: str, network: list[dict[str, Any]], space: Any):
    env, learner = make(case, observation_normalization=False)
    # skrl has no positions in spaces with names.
    network = [part | {"input": part["input"].replace("[1]", '["velocities"]')} for part in network]
    parameters = [{"network": network, "output": "ACTIONS"}, {"network": network, "output": "ONE"}]
    peer: Any = shared_model(
        observation_space=space,
        state_space=None,
        action_space=Box(-1, 1, (1,)),
        device="cpu",
        structure=["GaussianMixin", "DeterministicMixin"],
        roles=["policy", "value"],
        parameters=parameters,
    )
    rows = torch.cat(list(env.reset().values()), dim=1)
    inputs = {"observations": rows, "states": None}
    peer.act(inputs, role="policy")
    peer.act(inputs, role="value")
    model = learner.agent.policy
    assert model is learner.agent.value
    ours, theirs = ([p for p in each.parameters() if p.dim() > 1 or p.numel() > 0] for each in (model, peer))
    by_shape = [sorted(tuple(p.shape) for p in each) for each in (ours, theirs)]
    assert by_shape[0] == by_shape[1]
    body = [name for name, _ in peer.named_parameters() if "container" in name]
    own = [name for name, _ in model.named_parameters() if name.startswith(("parts", "network.0."))]
    values, peers = dict(model.named_parameters()), dict(peer.named_parameters())
    pairs = list(zip(own[: len(body)], body, strict=True))
    last = "network.0" if case == "skrl parts" else "network.2"
    for part in ("weight", "bias"):
        pairs += [(f"{last}.{part}", f"policy_layer.{part}"), (f"value.0.{part}", f"value_layer.{part}")]
    with torch.no_grad():
        for one, other in pairs:
            peers[other].copy_(values[one])
    for role in ("policy", "value"):
        torch.testing.assert_close(model.compute(inputs, role)[0], peer.compute(inputs, role)[0])


def test_shared_layers_with_observations_for_the_critic_are_refused():
    group = Group(Rank())
    env: Any = Grouped(range(4), ("policy", "critic"))
    with pytest.raises(UserError, match=r'policy and value cannot share layers.*"critic".*use --skrl.separate'):
        LEARNERS["skrl"].make(env, dataclasses.replace(SKRL, separate=False), 3, group)


def test_a_network_that_observes_a_group_that_the_task_does_not_have_is_refused():
    env: Any = Grouped(range(4), ("positions", "policy"))
    settings = dataclasses.replace(SKRL, network=yaml.safe_dump(IMAGE_PARTS))
    with pytest.raises(
        UserError, match="observes the group 'camera', which the task does not have: it has positions, p"
    ):
        LEARNERS["skrl"].make(env, settings, 3, Group(Rank()))


@pytest.mark.parametrize(
    ("name", "value"), [("network", yaml.safe_dump(PARTS)), ("mixed_precision", True), ("rnn_type", "gru")]
)
def test_settings_that_skrl_has_on_torch_only_are_refused_on_jax(name: str, value: Any):
    env: Any = Grouped(range(4), ("policy",))
    settings = dataclasses.replace(SKRL, **{name: value})
    flag = name.replace("_", "-")
    with pytest.raises(UserError, match=f"--skrl.{flag} needs skrl on torch: use --learner skrl"):
        LEARNERS["skrl_jax"].make(env, settings, 3, Group(Rank()))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"input": "__import__('os').system('x')"}, "an input consists of OBSERVATIONS"),
        ({"input": "later"}, "an input consists of OBSERVATIONS"),
        ({"input": "permute(OBSERVATIONS, (0, 2, 1, 3))"}, "an input consists of OBSERVATIONS"),
        ({"input": "OBSERVATIONS."}, "an input consists of OBSERVATIONS"),
        ({"layers": [{"conv3d": 3}]}, "a layer is a width, flatten, or conv2d"),
        ({"layers": [0]}, "a layer is a width, flatten, or conv2d"),
        ({"layers": [3, 3], "activations": ["elu", "gelu"]}, "give one of elu, leaky_relu"),
        ({"layers": [3], "activations": ["elu", "elu"]}, "give one of elu, leaky_relu"),
        ({"type": "RNN", "layers": [8]}, "a recurrent part has the type LSTM or GRU and one width"),
        ({"type": "GRU", "layers": [8, 8]}, "a recurrent part has the type LSTM or GRU and one width"),
        (
            {"type": "GRU", "layers": [8], "num_layers": 99},
            "num_layers of part 'net' of a network 99 must be",
        ),
        ({"type": "GRU", "layers": [8], "activations": "elu"}, "unknown key 'activations'"),
        ({"layer": [3]}, "unknown key 'layer': did you mean 'layers'"),
    ],
)
def test_a_part_that_cannot_be_built_is_refused_in_one_line(part: dict[str, Any], message: str):
    with pytest.raises(UserError) as error:
        parse_parts(yaml.safe_dump([{"name": "net"} | part]))
    assert message in str(error.value)
    assert "part 'net' of a network" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
