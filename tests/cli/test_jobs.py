"""A job is watched and ended by its ID, from another terminal."""

import threading
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

from tests.forked import paceline
from tests.launch.workflows import SECONDS, launch, marked, start, states, task, wait_for, workflow


def test_a_job_is_watched_and_canceled(tmp_path: Path):
    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        script = "echo hello; printf 'no end'; setsid sleep 1000 & touch {{output}}/up; wait"
        port = f"environment: {{TENSORBOARD_PORT: {served.server_port}}}"
        (tmp_path / "file.yaml").write_text(workflow(task("one", script, port), task("second", script)))
        process = start(tmp_path, "launch", "file.yaml", "--follow")
        try:
            wait_for(lambda: len(list(tmp_path.glob("jobs/test-1/*/output/up"))) == 2)
            follower = start(tmp_path, "logs", "test-1", "second", "--follow")
            status = paceline("status", "test-1", cwd=tmp_path)
            logs = paceline("logs", "jobs/test-1", cwd=tmp_path)
            board = paceline("tensorboard", "test-1", cwd=tmp_path)
            canceled = paceline("cancel", "test-1", cwd=tmp_path)
            assert not marked(tmp_path / "jobs")
            output, _ = process.communicate(timeout=SECONDS)
            followed, _ = follower.communicate(timeout=SECONDS)
        finally:
            process.kill()
            process.communicate()
            served.shutdown()
    assert "test-1 on local: running" in status.stdout
    assert [line.split()[:4] for line in status.stdout.splitlines()[2:]] == [
        ["one", "one", "127.0.0.1", "running"],
        ["second", "second", "127.0.0.1", "running"],
    ]
    assert logs.stdout == "one    | hello\none    | no end\nsecond | hello\nsecond | no end\n"
    assert (followed, follower.returncode) == ("hello\nno end\n", 0)
    assert (board.stdout, board.returncode) == (f"http://127.0.0.1:{served.server_port}\n", 0)
    assert (canceled.returncode, "has ended: interrupted" in canceled.stdout) == (0, True)
    assert process.returncode == 130
    assert "second | hello\n" in output
    assert states(tmp_path) == {"one": ("stopped", 143), "second": ("stopped", 143)}


def test_what_does_not_exist_is_refused_by_name(tmp_path: Path):
    assert launch(workflow(task("one", "echo x")), tmp_path).returncode == 0
    (tmp_path / "jobs" / "broken").mkdir()
    (tmp_path / "jobs" / "broken" / "job.json").write_text("{}")
    expected = {
        ("status", "broken"): "broken/job.json is not the record of a job: Field required",
        ("status", "tset-1"): "unknown job 'tset-1': did you mean 'test-1'?",
        ("logs", "test-1", "on"): "unknown task 'on': did you mean 'one'?",
        ("tensorboard", "test-1"): "no task of test-1 serves TensorBoard",
    }
    for command, message in expected.items():
        done = paceline(*command, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
    again = paceline("cancel", "test-1", cwd=tmp_path)
    assert (again.returncode, "has ended before: completed" in again.stdout) == (0, True)
