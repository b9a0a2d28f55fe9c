"""Settings of a site, which a workflow file does not have: where jobs are stored and how tasks are started."""

import os
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import AfterValidator, BaseModel, ConfigDict

from paceline.errors import UserError, one_line
from paceline.launch.document import Document, LineError
from paceline.validation import read_text


class Section(BaseModel):
    """Base of all sections: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskLimits(Section):
    """Settings of all engines that start the tasks themselves."""

    grace_seconds: Annotated[float, Ge(0), Le(3600)] = 30.0
    """Time between SIGTERM and SIGKILL when a task is stopped, s; from 0 to 3600."""
    max_reschedules: Annotated[int, Ge(0), Le(1000)] = 10
    """Number of times that a task or group may be started again by the exit action RESCHEDULE, from 0 to 1000."""


class LocalSettings(TaskLimits):
    """Settings of the engine `local`."""


class Profile(Section):
    """Settings of a site."""

    storage_root: Annotated[Path, AfterValidator(Path.expanduser)] = Path()
    """Directory that holds the directories jobs/ and datasets/. The default is the current directory."""
    environment: Annotated[Path, AfterValidator(Path.expanduser)] | None = None
    """Virtual environment whose programs the tasks use. The default is the one in which Paceline runs."""
    local: LocalSettings = LocalSettings()


def default_path() -> Path:
    """Return $XDG_CONFIG_HOME/paceline/profile.yaml, by default ~/.config/paceline/profile.yaml."""
    home = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(home).expanduser() / "paceline" / "profile.yaml"


def read_profile(path: Path | None) -> Profile:
    """Read a profile. Without a path, read the default one, or return the defaults if it does not exist."""
    file = path or default_path()
    if path is None and not file.exists():
        return Profile()
    try:
        return Document(read_text(file)).validate(Profile, ())
    except LineError as error:
        raise UserError(f"{file}:{error.line}: {error}") from None
    except OSError as error:
        raise UserError(f"cannot read the profile {file}: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{file} is not a profile: {one_line(error)}") from None
