from pathlib import Path

from paceline.run.metrics_file import MetricsFile, read_metrics


def test_lines_of_one_iteration_are_merged_and_a_later_session_replaces_iterations(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    first = MetricsFile(file, 1, {"world_size": 1})
    first.log(1, {"a": 1.0})
    first.flush()
    first.log(1, {"b": 2.0})
    first.log(2, {"a": 3.0})
    first.log(3, {"a": 4.0})
    first.close()
    with file.open("a") as stream:
        stream.write('{"iteration": 4, "a"')  # a process was killed while it wrote
    second = MetricsFile(file, 3, {"world_size": 2})
    second.log(3, {"a": 5.0})
    second.close()
    iterations, sessions = read_metrics(file)
    assert iterations == [{"iteration": 1, "a": 1.0, "b": 2.0}, {"iteration": 2, "a": 3.0}, {"iteration": 3, "a": 5.0}]
    assert sessions == [{"first_iteration": 1, "world_size": 1}, {"first_iteration": 3, "world_size": 2}]
