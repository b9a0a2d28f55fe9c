"""Options of the viewer, which `paceline play` and `paceline train` share."""

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le
from tyro.conf import FlagCreatePairsOff

from paceline.run.config import option

MAX_ENVS = 64


@dataclass(frozen=True, kw_only=True)
class ViewerOptions:
    viewer: Annotated[bool, FlagCreatePairsOff] = False
    """Show the policy in several envs on a web page (pip install 'paceline[viewer]')."""
    viewer_host: Annotated[str, option("ADDRESS")] = "127.0.0.1"
    """Address on which the viewer listens. The default can be reached from this host only; 0.0.0.0 can be reached from
    other hosts, without a password."""
    viewer_port: Annotated[Annotated[int, Ge(1), Le(65535)] | None, option("PORT")] = None
    """Port on which the viewer listens, from 1 to 65535. The default is the first free port from 8080 on."""
    viewer_envs: Annotated[int, Ge(1), Le(MAX_ENVS), option("N")] = 4
    """Number of envs that the viewer shows, from 1 to 64. They are simulated on the CPU."""


def without_viewer_options(arguments: Any) -> dict[str, Any]:
    """Return the other options by name."""
    return {name: value for name, value in vars(arguments).items() if not name.startswith("viewer")}
