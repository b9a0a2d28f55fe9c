import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.distributed.launcher import under_launcher, variables_without_launcher, without_launcher


def test_no_other_module_reads_the_rank():
    package = Path(paceline.__file__).parent
    read = re.compile(r'environ.*"(LOCAL_)?(RANK|WORLD_SIZE)"|"(LOCAL_)?(RANK|WORLD_SIZE)".* in os\.environ')
    readers = [file.relative_to(package) for file in package.rglob("*.py") if read.search(file.read_text())]
    assert readers == [Path("distributed/launcher.py")]


def test_the_entry_point_reads_the_rank_without_torch():
    code = "import sys, paceline.__main__; sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_hidden_launcher_is_restored(monkeypatch: pytest.MonkeyPatch):
    names = {"RANK": "1", "WORLD_SIZE": "2", "JAX_LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "run"}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with without_launcher():
        assert not under_launcher()
        assert dict(os.environ) == {name: value for name, value in before.items() if name not in names}
    assert dict(os.environ) == before


def test_variables_for_a_process_that_is_no_rank():
    assert variables_without_launcher({"RANK": "0", "MASTER_PORT": "1", "JAX_RANK": "0", "PATH": "/bin"}) == {
        "PATH": "/bin"
    }
