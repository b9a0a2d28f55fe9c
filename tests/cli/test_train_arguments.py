"""The two-stage parse of `paceline train`."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.cli.commands import DoctorArguments, PlayArguments
from paceline.cli.options import option_names, parse_options
from paceline.cli.train_arguments import TrainArguments, parse
from paceline.errors import UserError
from paceline.validation import from_dict

CPU = ["--gpu-ids", "none"]


@pytest.mark.parametrize(
    "argv",
    [
        ["cartpole", "--seed", "3"],
        ["--seed", "3", "cartpole"],
        ["--headless", "cartpole", "--seed=3"],
        ["--enable_cameras", "cartpole", "--seed=3"],
        ["--viewer", "cartpole", "--seed=3"],
        ["--learner", "ppo", "cartpole", "--seed", "3"],
        ["--seed", "3", "--task", "cartpole"],
        ["--task=cartpole", "--seed=3"],
    ],
)
def test_the_task_may_be_anywhere_on_the_line(argv: list[str]):
    command = parse([*argv, *CPU])
    assert (command.config.task, command.config.seed) == ("cartpole", 3)


def test_the_last_of_several_values_counts_and_underscores_equal_dashes():
    argv = ["cartpole", *CPU, "--num_envs", "4", "--num-envs", "8", "--learner", "skrl", "--learner=rsl_rl"]
    config = parse(argv).config
    assert (config.num_envs, config.learner) == (8, "rsl_rl")
    assert config.settings["num_steps_per_env"] > 0


def test_the_framework_selects_the_learner():
    assert parse(["cartpole", *CPU, "--ml_framework", "jax"]).config.learner == "skrl_jax"
    assert parse(["cartpole", *CPU, "--learner", "skrl", "--ml_framework", "jax"]).config.learner == "skrl_jax"
    assert parse(["cartpole", *CPU, "--ml_framework", "torch"]).config.learner == "ppo"
    with pytest.raises(UserError, match="only skrl has JAX"):
        parse(["cartpole", *CPU, "--learner", "rsl_rl", "--ml-framework", "jax"])


def test_options_of_another_learner_do_not_exist():
    with pytest.raises(UserError, match=r"unknown option '--rsl-rl\.lam'"):
        parse(["cartpole", *CPU, "--rsl-rl.lam", "0.5"])


def test_a_switch_given_by_flag_replaces_the_value_of_a_configuration_file(tmp_path: Path):
    file = tmp_path / "rsl_rl.yaml"
    file.write_text("num_steps_per_env: 8\nalgorithm: {use_clipped_value_loss: true}\n")
    argv = ["cartpole", *CPU, "--learner", "rsl_rl", "--learner-config", str(file)]
    assert parse(argv).config.settings["use_clipped_value_loss"] is True
    assert parse([*argv, "--rsl-rl.no-use-clipped-value-loss"]).config.settings["use_clipped_value_loss"] is False


def test_the_name_of_another_library_selects_the_task_and_its_options():
    command = parse(["--task=Isaac-Cartpole-Depth-Camera-Direct-v0", "--enable_cameras", *CPU])
    assert command.config.task == "cartpole-camera"
    assert command.config.env["camera"]["streams"] == ["depth"]
    (note,) = command.notes
    assert note.startswith("Isaac-Cartpole-Depth-Camera-Direct-v0 is the task cartpole-camera")


def test_a_flag_replaces_an_option_that_belongs_to_a_name():
    command = parse(["--headless", "Isaac-Cartpole-Depth-Camera-Direct-v0", *CPU, "--env.camera.streams", "normals"])
    assert command.config.env["camera"]["streams"] == ["normals"]


@pytest.mark.parametrize("kind", [TrainArguments, DoctorArguments, PlayArguments])
def test_option_names_are_those_of_the_help_page(kind: type, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        parse_options(kind, ["--help"], "test")
    page = capsys.readouterr().out
    names = option_names(kind)
    assert len(names) >= 7
    assert not [name for name in names if f" {name} " not in page and f" {name}, " not in page]


def test_an_error_of_the_constructor_is_one_line():
    @dataclass(frozen=True)
    class Options:
        legs: int = 4

        def __post_init__(self) -> None:
            if self.legs % 2:
                raise ValueError("legs must\nbe even")

    with pytest.raises(UserError, match=r"^legs must be even$"):
        parse_options(Options, ["--legs", "3"], "command")
    with pytest.raises(UserError, match=r"^run\.yaml: legs must be even$"):
        from_dict(Options, {"legs": 3}, "run.yaml")
