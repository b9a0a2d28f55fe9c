"""The error for tasks of dm_control, which does not run with MuJoCo 4."""

from typing import NoReturn

from paceline.errors import UserError


def entry(name: str) -> NoReturn:
    """Raise UserError: dm_control reads fields of the model that MuJoCo 4 no longer has."""
    raise UserError(
        f"dm_control:{name} is not supported: dm_control 1.0.50 reads MjModel.flex_vertedge, which MuJoCo 4 does not "
        "have; MuJoCo Playground has most tasks of its suite, for example playground:WalkerWalk"
    )
