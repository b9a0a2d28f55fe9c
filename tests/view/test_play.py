"""Videos of real runs, decoded again, and errors."""

import os
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import mujoco
import numpy as np
import pytest

from paceline.env.robot_env import RobotEnv
from paceline.errors import UserError
from paceline.tasks.shadow_hand_repose import ShadowHandRepose
from paceline.view.camera import Arrow, Camera
from paceline.view.play import record
from paceline.view.robot import copy_state
from paceline.view.video import frame_rate

TWO_BALLS = """
<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <geom type="sphere" size=".5" pos="-3 0 0" rgba="0 0 1 1"/>
    <geom type="sphere" size=".5" pos="3 0 0" rgba="1 0 0 1"/>
    CAMERAS
  </worldbody>
</mujoco>"""
AT_BLUE = '<camera name="{}" pos="-3 -2 0" xyaxes="1 0 0 0 0 1"/>'
AT_RED = '<camera name="{}" pos="3 -2 0" xyaxes="1 0 0 0 0 1"/>'


def paceline(*argv: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *map(str, argv)]
    env = os.environ | environment
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=120)


def decode(file: Path) -> tuple[av.VideoStream, np.ndarray]:
    """Return the stream and its frames, RGB [frame, height, width, 3]."""
    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        return stream, np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])


def test_a_video_has_the_given_length_and_size_and_shows_the_robot_moving(tiny_run: Path, tmp_path: Path):
    file = tmp_path / "new" / "directory" / "video.mp4"
    recording = record(str(tiny_run), file, seconds=1.5, width=160, height=120, seed=0)
    stream, frames = decode(file)
    assert (stream.codec_context.name, stream.pix_fmt, stream.average_rate) == ("h264", "yuv420p", 60)
    assert frames.shape == (90, 120, 160, 3)
    assert frames.std(axis=(1, 2, 3)).min() > 10.0, "a frame of one color"
    moved = np.abs(frames[1:].astype(float) - frames[0]).max(axis=(1, 2, 3))
    assert moved.max() > 50.0, "all frames are equal"
    assert [f.name for f in file.parent.iterdir()] == [file.name]
    assert recording.file == file
    assert recording.seconds == pytest.approx(1.5)
    assert recording.mean_reward < 1.0
    assert sum(episode.seconds for episode in recording.episodes) == pytest.approx(1.5)
    assert sum(episode.total for episode in recording.episodes) == pytest.approx(90 * recording.mean_reward, rel=1e-4)


def test_episodes_that_end_are_counted_and_the_next_one_is_shown(tiny_run: Path, tmp_path: Path):
    """The time limit of an episode is five seconds."""
    assert record(str(tiny_run), tmp_path / "video.mp4", 6.0, 16, 16, 0).num_ended >= 1


def test_the_overlay_is_on_by_default_and_off_in_small_frames(tiny_run: Path, tmp_path: Path):
    corner = {}
    for name, height, overlay in (("with", 240, True), ("without", 240, False), ("small", 120, True)):
        record(str(tiny_run), tmp_path / f"{name}.mp4", 0.1, 320, height, 0, overlay=overlay)
        corner[name] = decode(tmp_path / f"{name}.mp4")[1][-1, 10:60, 10:60].mean()
    # The sky is bright, the panel dark.
    assert corner["with"] < min(corner["without"], corner["small"]) - 40.0


def test_no_overlay_is_an_option_and_the_episodes_are_printed(tiny_run: Path, tmp_path: Path):
    argv = "play", tiny_run, "--video", tmp_path / "plain.mp4", "--seconds", 0.1, "--height", 240, "--no-overlay"
    done = paceline(*argv, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert decode(tmp_path / "plain.mp4")[1][-1, 10:60, 10:60].mean() > 100.0
    assert "episode 1: 0.1 s so far, return " in done.stdout


def test_the_goal_of_a_hand_has_the_commanded_rotation():
    task = ShadowHandRepose()
    env = RobotEnv(task, 1)
    data = mujoco.MjData(env.sim.model)
    copy_state(env, task.command_display(env.env_state), data)
    np.testing.assert_allclose(data.mocap_quat[0], env.env_state.task_state["goal"][0])


def test_arrows_are_rendered_at_their_place_in_their_color():
    model = mujoco.MjModel.from_xml_string(TWO_BALLS.replace("CAMERAS", AT_BLUE.format("front")))
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    arrow = Arrow(np.array((-3.4, -1.0, 0.3)), np.array((-2.6, -1.0, 0.3)), (0, 255, 0))
    with Camera(model, 64, 48) as camera:
        plain, with_arrow = (camera.render(data, arrows).astype(int).copy() for arrows in ((), (arrow,)))
        again = camera.render(data).astype(int)
    changed = (plain != with_arrow).any(axis=2)
    assert changed[:24].sum() > 20
    assert not changed[24:].any()
    assert with_arrow[changed][:, 1].mean() > 1.5 * with_arrow[changed][:, (0, 2)].mean()
    assert (again == plain).all()


def test_the_seed_decides_the_video(tiny_run: Path, tmp_path: Path):
    first, again, other = tmp_path / "first.mp4", tmp_path / "again.mp4", tmp_path / "other.mp4"
    for file, seed in ((first, 1), (again, 1), (other, 2)):
        record(str(tiny_run), file, 0.3, 64, 48, seed)
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()


def test_the_default_file_is_in_the_directory_of_the_run(tiny_run: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    newest = run / "checkpoints" / "iteration_00000002.safetensors"
    done = paceline("play", newest, "--seconds", "0.1", "--width", "64", "--height", "48", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    file = run / "videos" / "iteration_0002.mp4"
    assert done.stdout.startswith(f"{file}: 0.1 s, 0 episodes ended, mean reward ")
    assert decode(file)[1].shape == (6, 48, 64, 3)


@pytest.mark.parametrize(
    ("step_seconds", "stride", "rate"),
    [(1 / 60, 1, 60), (0.02, 1, 50), (0.01, 2, 50), (1 / 120, 2, 60), (0.1, 1, 10), (0.002, 9, Fraction(500, 9))],
)
def test_playback_is_in_real_time_with_at_most_60_frames_a_second(step_seconds, stride, rate):
    assert frame_rate(step_seconds) == (stride, rate)


@pytest.mark.parametrize(
    ("cameras", "balls"),
    [
        (AT_BLUE.format("front") + AT_RED.format("track"), {"red"}),
        (AT_BLUE.format("front") + AT_RED.format("side"), {"blue"}),
        ("", {"blue", "red"}),
    ],
)
def test_the_view_is_the_camera_track_or_the_first_camera_or_the_whole_scene(cameras: str, balls: set[str]):
    model = mujoco.MjModel.from_xml_string(TWO_BALLS.replace("CAMERAS", cameras))
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with Camera(model, 64, 48) as camera:
        redness = np.subtract(*np.moveaxis(camera.render(data)[..., ::2].astype(int), -1, 0))
    assert {"blue": redness.min() < -50, "red": redness.max() > 50} == {c: c in balls for c in ("blue", "red")}


def test_an_interrupted_video_leaves_nothing(tiny_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    frames = iter([np.zeros((48, 64, 3), np.uint8)] * 3)

    def render(_camera: Camera, _data: mujoco.MjData, _arrows: object) -> np.ndarray:
        for frame in frames:
            return frame
        raise KeyboardInterrupt

    monkeypatch.setattr(Camera, "render", render)
    with pytest.raises(KeyboardInterrupt):
        record(str(tiny_run), tmp_path / "new" / "video.mp4", 1.0, 64, 48, 0)
    assert list(tmp_path.iterdir()) == []


GOOD = {"video": None, "seconds": 1.0, "width": 64, "height": 48, "seed": 0}
BAD = {
    "no time": ({"seconds": 0.0}, "--seconds 0 must be above 0"),
    "negative time": ({"seconds": -2.0}, "--seconds -2 must be above 0"),
    "endless": ({"seconds": float("inf")}, "--seconds inf must be above 0 and at most 3600"),
    "not a number": ({"seconds": float("nan")}, "--seconds nan"),
    "no width": ({"width": 0}, "--width 0 must be even and from 16 to 4096: try --width 16"),
    "odd height": ({"height": 481}, "--height 481 must be even and from 16 to 4096: try --height 480"),
    "huge width": ({"width": 100_000}, "--width 100000 .* try --width 4096"),
    "negative seed": ({"seed": -1}, "--seed -1"),
    "not an mp4": ({"video": Path("video.gif")}, "--video video.gif: .* ends in .mp4"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_values_are_refused_by_name(case: str, tiny_run: Path):
    values, said = BAD[case]
    with pytest.raises(UserError, match=said):
        record(str(tiny_run), **(GOOD | values))


def test_a_directory_is_not_replaced_by_a_video(tiny_run: Path, tmp_path: Path):
    (tmp_path / "taken.mp4").mkdir()
    with pytest.raises(UserError, match="it exists and is not a file; choose another --video"):
        record(str(tiny_run), tmp_path / "taken.mp4", 1.0, 64, 48, 0)


def test_refusals_are_one_line_exit_2_and_leave_nothing(tiny_run: Path, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    no_driver = {"MUJOCO_GL": "egl", "__EGL_VENDOR_LIBRARY_FILENAMES": "/nonexistent"}
    before = {p: p.stat().st_mtime_ns for p in (*tmp_path.rglob("*"), *tiny_run.rglob("*"))}
    for argv, environment, said in (
        ([tiny_run, "--video", "file/video.mp4"], {}, f"{tmp_path / 'file'} is a file; choose another --video"),
        ([tiny_run, "--video", "/proc/video.mp4", "--seconds", "0.1"], {}, "cannot write the video /proc/video.mp4"),
        ([tiny_run], {"MUJOCO_GL": "off"}, "MUJOCO_GL=off turns rendering off"),
        ([tiny_run], no_driver, "apt-get install libegl1 libegl-mesa0 libgl1-mesa-dri libopengl0"),
    ):
        done = paceline("play", *argv, cwd=tmp_path, **environment)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert said in done.stderr
    assert before == {p: p.stat().st_mtime_ns for p in (*tmp_path.rglob("*"), *tiny_run.rglob("*"))}
