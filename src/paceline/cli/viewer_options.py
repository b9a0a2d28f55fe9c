"""Options of the viewer, which `paceline play` and `paceline train` share."""

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le
from tyro.conf import FlagCreatePairsOff

from paceline.errors import UserError
from paceline.run.config import option

MAX_ENVS = 64


@dataclass(frozen=True, kw_only=True)
class ViewerOptions:
    viewer: Annotated[bool, FlagCreatePairsOff] = False
    """Show the policy in several envs on a web page (pip install 'paceline[viewer]')."""
    viewer_host: Annotated[str, option("ADDRESS")] = "127.0.0.1"
    """Address on which the viewer listens: 127.0.0.1 for this host only, 0.0.0.0 for all hosts, without a password."""
    viewer_port: Annotated[Annotated[int, Ge(1), Le(65535)] | None, option("PORT")] = None
    """Port on which the viewer listens, from 1 to 65535. The default is the first free port from 8080 on."""
    viewer_envs: Annotated[int, Ge(1), Le(MAX_ENVS), option("N")] = 4
    """Number of envs that the viewer shows, from 1 to 64. They are simulated on the CPU."""


def check_viewer_options(options: ViewerOptions) -> None:
    """Raise UserError if an option of the viewer is given without --viewer."""
    if not options.viewer and (given := given_option(options, ViewerOptions)):
        raise UserError(f"{given} is an option of the viewer: add --viewer, or leave it out")


def given_option(options: Any, kind: type) -> str:
    """Return the first option that `kind` defines and that does not have its default, as on the command line, or an
    empty string."""
    for name in kind.__annotations__:
        value, flag = getattr(options, name), name.replace("_", "-")
        if value != getattr(kind, name):
            return f"--{flag} {value}" if not isinstance(value, bool) else f"--{'' if value else 'no-'}{flag}"
    return ""
