"""Run paceline.launch.task_runner on an SSH host: `python -m paceline.launch.engines.ssh_task prepare|run`.

All output goes to standard output. Standard error has messages of ssh, and `ENDED` with the exit code as last line:
without it, the connection has ended and not the task.
"""

import os
import sys

from paceline.launch import task_runner

ENDED = "paceline: exit code"


def main() -> int:
    # With this variable, every bash that a task runs would read bashrc.
    os.environ.pop("SSH_CLIENT", None)
    messages = os.dup(2)
    os.dup2(1, 2)
    code = task_runner.main()
    os.write(messages, f"{ENDED} {code}\n".encode())
    return code


if __name__ == "__main__":
    sys.exit(main())
