"""bench/config_files.py on a checkout that has the structure of Isaac Lab's."""

import subprocess
import sys
from pathlib import Path

from tests.learners.test_native_config import RL_GAMES, SKRL, changed

SCRIPT = Path(__file__).parents[2] / "bench" / "config_files.py"
CLASSES = """
from dataclasses import MISSING
from isaaclab.utils import configclass

@configclass
class Policy:
    class_name: str = "ActorCritic"
    init_noise_std: float = MISSING
    actor_hidden_dims: list[int] = MISSING
    critic_hidden_dims: list[int] = MISSING
    activation: str = "elu"

@configclass
class Algorithm:
    class_name: str = "PPO"
    gamma: float = MISSING
    symmetry_cfg: object = None

@configclass
class RslRlBaseRunnerCfg:
    num_steps_per_env: int = MISSING
    empirical_normalization: bool = MISSING
    actor: object = MISSING
    policy: Policy = MISSING
    algorithm: Algorithm = MISSING
"""
UPDATE = "def handle_deprecated_rsl_rl_cfg(config, version):\n    return config\n"
CONFIGURATIONS = """
from isaaclab.utils import configclass
from isaaclab_rl.rsl_rl import Algorithm, Policy, RslRlBaseRunnerCfg
from isaaclab_tasks.velocity.mdp.symmetry import anymal

@configclass
class Rough(RslRlBaseRunnerCfg):
    num_steps_per_env = 4
    policy = Policy(init_noise_std=0.5, actor_hidden_dims=[16], critic_hidden_dims=[8, 8])
    algorithm = Algorithm(gamma=0.9)

@configclass
class Flat(Rough):
    def __post_init__(self):
        super().__post_init__()
        self.policy.actor_hidden_dims = [4]

@configclass
class Symmetric(Flat):
    algorithm = Algorithm(gamma=0.9, symmetry_cfg={"data_augmentation_func": anymal.mirror})
"""


def test_the_script_prints_which_files_train_and_why_others_are_refused(tmp_path: Path):
    files = {
        "isaaclab_rl/rsl_rl/rl_cfg.py": CLASSES,
        "isaaclab_rl/rsl_rl/utils.py": UPDATE,
        "tasks/agents/rsl_rl_ppo_cfg.py": CONFIGURATIONS,
        "tasks/agents/rl_games_ppo_cfg.yaml": RL_GAMES,
        "tasks/agents/skrl_ppo_cfg.yaml": SKRL,
        "tasks/agents/skrl_amp_cfg.yaml": changed(SKRL, "agent.class", "AMP"),
        "tasks/agents/rl_games_lstm_cfg.yaml": changed(RL_GAMES, "params.network.unknown_rnn", {"name": "lstm"}),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, str(SCRIPT), str(tmp_path), "--num-envs", "4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = {
        line.split()[-1].rpartition("/")[2]: line.split()[1] for line in done.stdout.splitlines() if "/" in line
    }
    assert outcomes == {
        "rl_games_ppo_cfg.yaml": "trained",
        "rl_games_lstm_cfg.yaml": "recurrent",
        "skrl_ppo_cfg.yaml": "trained",
        "skrl_amp_cfg.yaml": "another",
        "rsl_rl_ppo_cfg.py:Rough": "trained",
        "rsl_rl_ppo_cfg.py:Flat": "trained",
        "rsl_rl_ppo_cfg.py:Symmetric": "other",
    }
    assert (
        "algorithm.symmetry_cfg is {data_augmentation_func: isaaclab_tasks.velocity.mdp.symmetry.anymal.mirror}"
        in done.stdout
    )
    assert "| all | 4 | 1 | 0 | 1 | 1 | 4 of 6, 66.7% |" in done.stdout
