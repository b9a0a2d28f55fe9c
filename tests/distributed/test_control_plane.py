"""The store traffic of 64 ranks, simulated on one machine."""

from bench.control_plane import simulate


def test_all_of_64_ranks_start_learn_of_a_failure_and_start_again():
    # The simulation checks that each rank learns of the failure, with its rank and cause.
    found = simulate(clients=64, watch_seconds=2.0)
    assert found["requests_per_loop"] == 2, "the traffic of the main rank grows with the number of ranks"
    assert found["loop_seconds"]["median"] < 1.0
    assert found["failure_seconds"] < 10.0
    assert found["startup_seconds"] > 0.0
    assert found["restart_seconds"] > 0.0
