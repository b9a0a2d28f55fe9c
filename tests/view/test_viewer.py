"""The pages of real viewers in headless Chromium, also behind nginx, and the server's address."""

import io
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright
from rich.console import Console

from paceline.errors import UserError
from paceline.run.config import TrainConfig
from paceline.run.directory import RunDir
from paceline.train import train
from paceline.view.viewer_server import DEFAULT_PORT, Address, choose_address, serve
from tests import forked
from tests.cameras.small import SMALL_ENCODER
from tests.signals import DEFAULT_SIGNALS
from tests.waiting import until

pytestmark = pytest.mark.root
SOFTWARE_GL = ("--no-sandbox", "--use-gl=angle", "--use-angle=swiftshader", "--enable-unsafe-swiftshader")
SECONDS = 120.0
# A low resolution, because the scene is rendered in software.
QUERY = "?fixedDpr=0.3"
HOST, PREFIX = "127.0.0.1", "/user/me/viewer"
NGINX = """
daemon off;
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
  access_log off;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder}; uwsgi_temp_path {folder};
  scgi_temp_path {folder};
  server {{
    listen {host}:{port} ssl;
    ssl_certificate {folder}/cert.pem;
    ssl_certificate_key {folder}/key.pem;
    {location}
  }}
}}
"""


def free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return probe.getsockname()[1]


def location_of_docs(port: int) -> str:
    """Return the configuration of nginx that docs/viewer.md recommends, for this port and `PREFIX`."""
    text = (Path(__file__).parents[2] / "docs" / "viewer.md").read_text()
    location = re.search(r"```nginx\n(.*?)```", text, re.DOTALL)
    assert location
    return location[1].replace("/viewer", PREFIX).replace("8080", str(port))


@contextmanager
def paceline(*argv: object, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `paceline ARGV --viewer` until the end of the context."""
    options = map(str, (*argv, "--viewer", "--viewer-port", port))
    with log.open("wb") as output:
        command = [*DEFAULT_SIGNALS, sys.executable, "-m", "paceline", *options]
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=log.parent)
    try:
        until(lambda: is_open(port) or process.poll() is not None, SECONDS, log.read_text)
        yield process
    finally:
        process.kill()
        process.wait()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a task with commands."""
    path = tmp_path_factory.mktemp("viewer") / "run"
    ppo = {"horizon": 4, "epochs": 1, "minibatches": 1, "hidden": (16, 16)}
    config = TrainConfig("go1-velocity", {}, num_envs=2, max_iterations=2, checkpoint_every=1, settings=ppo)
    train(config, RunDir(path), Console(quiet=True))
    return path


@pytest.fixture(scope="module")
def port(run: Path) -> Iterator[int]:
    """Port of a viewer of the run with two envs. Ctrl-C ends it with one line."""
    port, log = free_port(), run.parent / "log"
    with paceline("play", run, "--viewer-envs", 2, port=port, log=log) as process:
        yield port
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130
    page, tunnel, end = log.read_text().splitlines()
    assert page == f"viewer: http://{HOST}:{port}"
    assert f"ssh -L {port}:localhost:{port} " in tunnel
    assert end == "paceline: interrupted"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=SOFTWARE_GL)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """Open a page, wait for the first numbers of the viewer, and fail at the end if the console has an error."""
    page = browser.new_page(viewport={"width": 760, "height": 360}, ignore_https_errors=True)
    page.set_default_timeout(1000.0 * SECONDS)
    errors = list[str]()
    # viser frees an image that has been replaced, also if the browser has not loaded it yet.
    freed = "Failed to load resource: net::ERR_FILE_NOT_FOUND"
    page.on("console", lambda each: errors.append(each.text) if each.type == "error" and each.text != freed else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url + QUERY)
    page.get_by_text(re.compile(r"env \d+:")).wait_for()
    yield page
    page.close()
    assert errors == []


def scene(page: Page) -> np.ndarray:
    """Return the image of the scene, [height, width, 3]."""
    box = page.locator("canvas").first.bounding_box()
    assert box
    # The upper left corner may show a message of the page.
    clip = {"x": box["x"] + box["width"] / 3, "y": box["y"], "width": 2 * box["width"] / 3, "height": box["height"]}
    image = Image.open(io.BytesIO(page.screenshot(clip=clip)))  # pyright: ignore[reportArgumentType]
    return np.asarray(image.convert("RGB")).astype(int)


def stands_still(page: Page) -> bool:
    """Return whether the scene does not change within half a second."""
    before = scene(page)
    page.wait_for_timeout(500)
    return np.array_equal(scene(page), before)


def test_the_page_shows_moving_robots_and_its_controls_act(browser: Browser, port: int):
    with opened(browser, f"http://{HOST}:{port}") as page:
        # The sky and the floor have other colors than the robots.
        until(lambda: scene(page).std(axis=(0, 1)).max() > 10.0, SECONDS)
        first = scene(page)
        until(lambda: np.abs(scene(page) - first).max() > 50, SECONDS)

        page.get_by_role("button", name="Pause").click()
        page.get_by_text("paused").wait_for()
        # Frames that were sent before the pause may be drawn after it.
        until(lambda: stands_still(page), SECONDS)

        commanded = page.locator("tr", has_text="forward m/s").locator("td").nth(1)
        before = commanded.inner_text()
        page.keyboard.press("i")
        page.get_by_role("button", name="Step").click()
        until(lambda: commanded.inner_text() != before, SECONDS)
        assert commanded.inner_text() == "0.10"
        assert page.get_by_label("Drive all envs").is_checked()

        page.locator("strong", has_text="iteration 2").wait_for()
        page.get_by_label("Checkpoint").click()
        page.get_by_role("option", name="iteration 1").click()
        page.locator("strong", has_text="iteration 1").wait_for()


def test_sliders_set_the_speed_and_the_command_of_the_selected_env(browser: Browser, port: int):
    """The plots show the rewards of this env."""
    with opened(browser, f"http://{HOST}:{port}") as page:
        page.get_by_role("button", name="Run").click()
        status, sliders = page.locator("p", has_text="real time"), page.get_by_role("slider")
        sliders.first.press("Home")
        until(lambda: "0.1 x real time" in status.inner_text(), SECONDS)
        sliders.first.press("End")
        until(lambda: "0.1 x real time" not in status.inner_text(), SECONDS)

        page.get_by_label("Env", exact=True).click()
        page.get_by_role("option", name="1").click()
        page.get_by_text("env 1:").wait_for()
        commanded = page.locator("tr", has_text="left m/s").locator("td").nth(1)
        sliders.nth(2).press("End")
        until(lambda: commanded.inner_text() == "0.50", SECONDS)
        page.get_by_role("button", name="Stop").click()
        until(lambda: commanded.inner_text() == "0.00", SECONDS)

        curves = page.locator(".uplot canvas")
        assert curves.count() == 2
        assert page.get_by_text("track_lin_vel").count() == 1
        assert page.get_by_text("feet_slip (dashed)").count() == 1
        shown = [curve.screenshot() for curve in curves.all()]
        until(
            lambda: all(curve.screenshot() != first for curve, first in zip(curves.all(), shown, strict=True)), SECONDS
        )

        seconds = re.compile(r"env 1: ([\d.]+) s")
        page.get_by_role("button", name="Pause").click()
        page.get_by_role("button", name="Reset").click()
        page.get_by_role("button", name="Step").click()
        until(lambda: (found := seconds.search(page.inner_text("body"))) and float(found[1]) < 0.1, SECONDS)


def test_the_page_works_behind_a_path_of_an_https_proxy(browser: Browser, port: int, tmp_path: Path):
    certificate = ("-keyout", "key.pem", "-out", "cert.pem", "-subj", "/CN=localhost", "-days", "1")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *certificate)
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    https = free_port()
    text = NGINX.format(folder=tmp_path, host=HOST, port=https, location=location_of_docs(port))
    (tmp_path / "nginx.conf").write_text(text)
    with (tmp_path / "log").open("wb") as log:
        nginx = subprocess.Popen(("nginx", "-c", tmp_path / "nginx.conf", "-e", "stderr"), stderr=log)
    try:
        until(lambda: is_open(https), SECONDS, (tmp_path / "log").read_text)
        with opened(browser, f"https://{HOST}:{https}{PREFIX}/") as page:
            first = scene(page)
            page.get_by_role("button", name="Run").click()
            until(lambda: np.abs(scene(page) - first).max() > 50, SECONDS)
    finally:
        nginx.terminate()
        nginx.wait()


def test_the_images_of_a_gymnasium_env_keep_their_proportions(browser: Browser, tmp_path: Path):
    ppo = {"horizon": 4, "epochs": 1, "minibatches": 1, "hidden": (8,)}
    config = TrainConfig("gymnasium:CartPole-v1", {}, num_envs=2, max_iterations=1, settings=ppo, logger=("none",))
    train(config, RunDir(tmp_path / "run"), Console(quiet=True))
    port = free_port()

    def cart(page: Page) -> tuple[int, int]:
        """Return the width and the height of the black cart, which is on a thin black line."""
        black = scene(page).max(axis=2) < 60
        columns = black.sum(axis=0) > 5
        return columns.sum(), (black[:, columns].mean(axis=1) > 0.5).sum()

    with (
        paceline("play", "run", "--viewer-envs", 1, port=port, log=tmp_path / "log"),
        opened(browser, f"http://{HOST}:{port}") as page,
    ):
        page.get_by_role("button", name="Pause").click()
        # The scene is higher than wide, the image of the env is wider than high. The cart has 50 x 30 pixels in it,
        # a few of which the pole hides.
        page.set_viewport_size({"width": 760, "height": 800})
        until(lambda: cart(page)[1] > 5 and 1.3 < cart(page)[0] / cart(page)[1] < 2.5, SECONDS, lambda: str(cart(page)))


def test_a_port_in_use_is_refused_and_the_default_is_the_next_one(run: Path, port: int):
    done = forked.paceline("play", run, "--viewer", "--viewer-port", port, cwd=run.parent)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"paceline: --viewer-port {port} is in use on {HOST}: choose another port, or leave the option out\n"
    )
    first = choose_address(HOST, None)
    with serve(first, "first"):
        assert DEFAULT_PORT <= first.port < choose_address(HOST, None).port


def test_training_shows_its_current_policy_and_ctrl_c_ends_both(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The page also shows what the cameras of the task see. The same port can be used at once afterwards."""
    port, log, temporary = free_port(), tmp_path / "log", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    argv = ["train", "cartpole-camera", "--gpu-ids", "none", "--num-envs", 4, "--max-iterations", 10**6]
    argv += ["--run-dir", "run", "--ppo.horizon", 8, "--env.camera.width", 24, "--env.camera.height", 16]
    for name, value in SMALL_ENCODER.items():
        argv += [f"--ppo.{name.replace('_', '-')}", *(value if isinstance(value, tuple) else (value,))]
    with paceline(*argv, port=port, log=log) as process:
        with opened(browser, f"http://{HOST}:{port}") as page:
            page.get_by_text("front_rgb").wait_for()
            picture = page.get_by_role("img").last
            # Two rows of two envs, enlarged.
            until(lambda: picture.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [288, 192], SECONDS)
            shown = page.locator("strong", has_text="iteration")
            first = shown.inner_text()
            until(lambda: shown.inner_text() != first, SECONDS, log.read_text)
            (folder,) = (path for path in temporary.iterdir() if path.name.startswith("paceline-"))
            assert (folder / "watched").exists()
        # The training no longer writes policies for a page that is closed, until it is opened again.
        until(lambda: not (folder / "watched").exists(), SECONDS)
        with opened(browser, f"http://{HOST}:{port}"):
            assert (folder / "watched").exists()
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    assert list(temporary.glob("paceline-*")) == []
    with serve(choose_address(HOST, port), "again"):
        assert is_open(port)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("play run --viewer --seconds 4", "--seconds 4.0 with --viewer: the viewer records no video; leave one of "),
        ("play run --viewer --no-overlay", "--no-overlay with --viewer: the viewer records no video; leave one of "),
        ("play run --viewer-port 90", "--viewer-port 90 is an option of the viewer: add --viewer, or leave it out"),
        ("train cartpole --viewer-envs 2", "--viewer-envs 2 is an option of the viewer: add --viewer, or leave it out"),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(argv: str, said: str, tmp_path: Path):
    done = forked.paceline(*argv.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("192.0.2.1", None, "--viewer-host 192.0.2.1: Cannot assign requested address; choose an address of this host"),
        ("no.such.host.invalid", None, "--viewer-host no.such.host.invalid: .*; choose an address of this host"),
    ],
)
def test_an_address_of_another_host_is_refused(host: str, port: int | None, said: str):
    with pytest.raises(UserError, match=said):
        choose_address(host, port)


def test_an_address_for_all_hosts_is_printed_with_the_name_of_this_host_and_a_warning():
    (line,) = Address("0.0.0.0", 8080).lines()
    assert line.startswith(f"viewer: http://{socket.gethostname()}:8080 (without a password")
    assert Address("::1", 8080).lines()[0] == "viewer: http://[::1]:8080"


def test_the_extra_is_named_if_viser_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "viser", None)
    with pytest.raises(UserError, match=r"paceline\[viewer\]"):
        choose_address(HOST, None)
