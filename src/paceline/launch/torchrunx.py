"""Several ranks on this machine or on several, over SSH, by torchrunx.

torchrunx is under the GPL-3.0 and therefore an extra of its own: `pip install paceline[torchrunx]`. It does not start
ranks anew after a failure; torch's elastic launcher does.
"""

import runpy
import sys

from paceline.errors import UserError
from paceline.launch.local import RankFailedError


def launch(words: list[str], ranks: int, hosts: tuple[str, ...]) -> None:
    """Run `paceline WORDS` in `ranks` processes on each of `hosts`, or here; Paceline must be installed on each."""
    try:
        import torchrunx
    except ModuleNotFoundError:
        raise UserError("--launcher torchrunx needs torchrunx (GPL-3.0): pip install 'paceline[torchrunx]'") from None
    launcher = torchrunx.Launcher(
        hostnames=list(hosts) or ["localhost"],
        workers_per_host=ranks,
        backend=None,  # the ranks form their own group
        copy_env_vars=(*torchrunx.launcher.DEFAULT_ENV_VARS_FOR_COPY, "PACELINE*", "GLOO*", "OMP*", "GOMP*", "MUJOCO*"),
    )
    try:
        launcher.run(_work, words)
    except Exception as error:
        raise RankFailedError(f"{type(error).__name__}: {error}") from error


def _work(words: list[str]) -> None:
    """In a rank's process."""
    sys.argv = ["paceline", *words]
    try:
        runpy.run_module("paceline", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise RankFailedError(f"ended with {end.code}") from None
