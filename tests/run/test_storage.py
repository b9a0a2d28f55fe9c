"""Files and directories are copied to and from URLs, on a local disk and on an S3 server."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.run import storage
from paceline.run.storage import Folder, StorageError, download, upload
from tests.run.s3 import BUCKET, S3Server, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, server: S3Server, tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/folder" if request.param == "file" else f"s3://{BUCKET}/{tmp_path.name}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub" / "large").write_bytes(os.urandom(2**20 + 1))
    (source / "empty").touch()
    return source


def _content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_directory_is_the_same_after_upload_and_download(source: Path, url: str, tmp_path: Path):
    upload(source, url)
    download(url, tmp_path / "copy")
    assert _content(tmp_path / "copy") == _content(source)


def test_only_files_that_match_are_transferred(source: Path, url: str, tmp_path: Path):
    (source / ".hidden").touch()
    upload(source, url, regex=".*large|.hidden")
    assert Folder(url).listing() == [".hidden", "sub/large"]
    download(url, tmp_path / "copy", regex=r"^\.")
    assert set(_content(tmp_path / "copy")) == {".hidden"}


def test_the_url_of_a_file_is_downloaded_to_a_directory(source: Path, url: str, tmp_path: Path):
    upload(source, url)
    download(f"{url}/sub/large", tmp_path / "copy")
    assert _content(tmp_path / "copy") == {"large": (source / "sub" / "large").read_bytes()}


def test_an_uploaded_file_replaces_the_stored_one_and_can_be_deleted(source: Path, url: str):
    folder = Folder(url)
    first = folder.upload(source / "empty", "name")
    (source / "empty").write_bytes(b"text")
    assert folder.upload(source / "empty", "name") != first
    assert folder.read("name") == b"text"
    folder.delete("name")
    folder.delete("name")
    assert folder.read("name") is None
    assert folder.listing() == []


def test_a_download_with_another_checksum_is_refused_and_leaves_no_file(
    source: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(storage, "BACKOFF_SECONDS", (0.01,))
    folder = Folder(url)
    checksum = folder.upload(source / "sub" / "large", "name")
    folder.download("name", tmp_path / "copy", checksum)
    folder.write("name", b"damaged")
    (tmp_path / "copy").unlink()
    with pytest.raises(StorageError, match="differs from what was uploaded"):
        folder.download("name", tmp_path / "copy", checksum)
    assert set(os.listdir(tmp_path)) <= {"source", "store"}


def test_a_file_that_is_removed_before_its_upload_is_skipped(url: str, tmp_path: Path):
    assert Folder(url).upload(tmp_path / "removed", "name") is None


def test_a_missing_bucket_is_an_error_that_names_the_local_file(server: S3Server, source: Path):
    with pytest.raises(StorageError, match=r"cannot upload s3://missing/run/empty: .*local copy is .*empty"):
        Folder("s3://missing/run").upload(source / "empty", "empty")


def test_a_folder_without_files_is_not_downloaded(url: str, tmp_path: Path):
    with pytest.raises(StorageError, match="no files"):
        download(url, tmp_path / "copy")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://KEY:hidden@bucket/run", "environment variables"),
        ("s3://bucket/run?X-Amz-Signature=hidden", "environment variables"),
        ("ftp://host/run", "unknown URL scheme 'ftp'"),
        ("memory://run/a", "unknown URL scheme 'memory'"),
        ("s3://bucket", "names no folder"),
        ("file://runs/a", "three slashes"),
        ("s3://[hidden/run", "a URL is invalid"),
        ("file:///hidden\0", "a URL is invalid"),
    ],
)
def test_an_invalid_url_is_refused_without_repeating_a_secret(url: str, message: str):
    with pytest.raises(UserError, match=message) as raised:
        Folder(url)
    assert "hidden" not in str(raised.value)


def test_a_key_outside_of_the_folder_is_refused(tmp_path: Path, server: S3Server):
    folder = Folder(f"s3://{BUCKET}/{tmp_path.name}")
    folder.write("../outside", b"")
    folder.write("sub/../../outside", b"")
    with pytest.raises(StorageError, match="outside"):
        download(folder.url, tmp_path / "copy")
    assert not (tmp_path / "outside").exists()
