"""Registry of tasks."""

from mjlab.envs import ManagerBasedRlEnvCfg  # pyright: ignore[reportMissingImports]
from mjlab.rl import RslRlOnPolicyRunnerCfg  # pyright: ignore[reportMissingImports]

TASKS: list[str] = []


def list_tasks() -> list[str]:
    return TASKS


def load_env_cfg(task_name: str, play: bool = False) -> ManagerBasedRlEnvCfg:
    return ManagerBasedRlEnvCfg()


def load_rl_cfg(task_name: str) -> RslRlOnPolicyRunnerCfg:
    return RslRlOnPolicyRunnerCfg()
