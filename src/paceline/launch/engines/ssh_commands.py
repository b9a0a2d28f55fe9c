"""Command lines of ssh and rsync for one host."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from paceline.launch.profile import SshHost, SshSettings, SyncedPath

LOST_CODE = 255
"""Exit code of ssh if the connection fails."""
_UNANSWERED = 4
"""Number of requests that a host may leave unanswered."""


@dataclass(frozen=True)
class SshCommands:
    host: SshHost
    settings: SshSettings
    storage_root: Path
    """Directory on the host that holds jobs/ and datasets/."""
    venv: Path
    """Virtual environment on the host."""

    @property
    def alive_seconds(self) -> int:
        """Time between two messages that show that a connection works, s."""
        return max(1, int(self.settings.lost_seconds / (_UNANSWERED + 1)))

    def ssh(self, *more: str) -> list[str]:
        """Return the command line of ssh, up to the name of the host, with further options."""
        options = {
            "BatchMode": "yes",
            "ConnectTimeout": f"{self.settings.connect_seconds:.0f}",
            "ServerAliveInterval": self.alive_seconds,
            "ServerAliveCountMax": _UNANSWERED,
            # A connection that is shared with other programs would not have these settings.
            "ControlPath": "none",
        }
        # ssh uses the first value of an option: those of the profile come first.
        command = ["ssh", *self.settings.options, "-T"]
        command += [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
        for flag, value in (("-l", self.host.user), ("-p", self.host.port), ("-i", self.host.identity_file)):
            command += [flag, str(value)] if value is not None else []
        return [*command, *more, self.host.reached_at]

    def python(self, module: str, *arguments: str) -> list[str]:
        """Return the command line that runs a module on the host."""
        return [*self.ssh(), shlex.join([str(self.venv / "bin" / "python"), "-P", "-m", module, *arguments])]

    def sync(self, path: SyncedPath) -> list[str]:
        """Return the command line that copies a path of the profile to the host."""
        home, separator, rest = path.source.partition("/")
        source = f"{Path(home).expanduser()}{separator}{rest}" if home.startswith("~") else path.source
        return self._rsync([f"--exclude={pattern}" for pattern in path.exclude], source, self._place(path.target))

    def push(self, source: Path, target: Path) -> list[str]:
        """Return the command line that copies the contents of a directory to a directory on the host."""
        return self._rsync([], f"{source}/", self._place(f"{target}/"))

    def pull(self, source: Path, target: Path) -> list[str]:
        """Return the command line that copies the contents of a directory on the host to a directory."""
        return self._rsync([], self._place(f"{source}/"), f"{target}/")

    def _rsync(self, options: list[str], source: str, target: str) -> list[str]:
        return ["rsync", "--archive", "--mkpath", *options, "-e", shlex.join(self.ssh()[:-1]), "--", source, target]

    def _place(self, path: str) -> str:
        address = self.host.reached_at
        return f"{f'[{address}]' if ':' in address else address}:{path}"
