"""Copy files and directories to and from URLs: file://, s3:// and other object stores that fsspec supports.

Credentials come from the environment, as the libraries of each store define them. A URL never contains them.
"""

import hashlib
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from fsspec import get_filesystem_class
from fsspec.core import url_to_fs

from paceline.errors import UserError, one_line, unknown

# The package that supports each scheme.
_PACKAGES = {"file": "", "s3": "'paceline[s3]'", "gs": "gcsfs", "az": "adlfs"}
# The libraries below s3fs repeat requests too. Without this limit an outage is reported only after minutes.
_OPTIONS = {"s3": {"config_kwargs": {"retries": {"total_max_attempts": 1}}}}
# Waiting times between the attempts of a transfer, s.
BACKOFF_SECONDS = (1.0, 2.0, 4.0)
# Another attempt does not change the outcome of these errors.
_PERMANENT = (PermissionError, FileNotFoundError, NotADirectoryError, IsADirectoryError)
_BLOCK = 2**23
# Name of a file whose transfer is not complete.
_PART = re.compile(r"(^|/)\.[^/]*\.[0-9]+\.part$")

T = TypeVar("T")


class StorageError(Exception):
    """A transfer failed after all attempts. The message names the file, the URL and the reason. Local files stay."""


class NothingStoredError(StorageError):
    """There are no files at the URL."""


class ChecksumError(Exception):
    """The content of a file differs from what was transferred."""


def lower_priority() -> None:
    """Give this thread, and the threads that it starts later, the lowest priority, so that transfers use the CPU time
    that training leaves."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    if sys.platform == "linux":
        # Threads of this policy do not interrupt others when data arrives.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def is_url(text: str) -> bool:
    return "://" in text


class Folder:
    """A folder at a URL. Its methods repeat failed transfers and raise `StorageError` if they still fail."""

    def __init__(self, url: str):
        """Raise UserError if the URL is invalid or its package is not installed."""
        self.url = check_url(url).rstrip("/")
        scheme = urlsplit(url).scheme
        try:
            # Listings are not cached, because other processes may write to the folder. Connections are not, because the
            # environment may name another server later.
            caching = {"use_listings_cache": False, "skip_instance_cache": True}
            self._files, self._root = url_to_fs(self.url, **caching, **_OPTIONS.get(scheme, {}))
        except ImportError:
            raise _not_installed(url) from None
        except Exception as error:
            raise UserError(f"cannot open {url}: {one_line(error)}") from None
        self._is_local = scheme == "file"

    def listing(self) -> list[str]:
        """Return the names of all files in the folder and below, relative to it. Incomplete files are left out."""
        prefix = self._root.rstrip("/") + "/"
        found = self._repeat("list", "", lambda: self._files.find(self._root))
        names = [name.removeprefix(prefix) for name in found if name.startswith(prefix)]
        if outside := [name for name in names if ".." in name.split("/")]:
            raise StorageError(f"{self.url} has a file {outside[0]!r}, which is outside of the folder: rename it")
        return sorted(name for name in names if not _PART.search(name))

    def is_file(self) -> bool:
        """Return whether the URL is that of a file, whose name in this folder is an empty string."""
        return self._repeat("find", "", lambda: self._files.isfile(self._root))

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file, or None if there is no such file."""

        def read() -> bytes | None:
            with suppress(FileNotFoundError):
                return self._files.cat_file(self._path(name))

        return self._repeat("read", name, read)

    def write(self, name: str, content: bytes) -> None:
        """Write a small file and verify it."""

        def write() -> None:
            self._replace(name, lambda path: self._files.pipe_file(path, content))
            if self._files.cat_file(self._path(name)) != content:
                raise ChecksumError("the stored content differs")

        self._repeat("write", name, write)

    def upload(self, file: Path, name: str) -> str | None:
        """Upload a file, read it back and compare the SHA-256 checksums. Return the checksum, or None if the local file
        was removed before. A file that grows meanwhile, such as a log, is uploaded up to some length."""

        def upload() -> str | None:
            try:
                size = file.stat().st_size
                self._replace(name, lambda path: self._files.put_file(str(file), path))
                with self._files.open(self._path(name), "rb", block_size=_BLOCK) as stored:
                    checksum, length = _sha256(stored)
                with file.open("rb") as local:
                    expected, _ = _sha256(local, length)
            except FileNotFoundError:
                if file.exists():
                    raise  # the bucket does not exist
                return None
            if checksum != expected or length < size:
                raise ChecksumError("the stored content differs from the local file")
            return checksum

        return self._repeat("upload", name, upload, f"; the local copy is {file}")

    def download(self, name: str, file: Path, checksum: str | None = None) -> None:
        """Download a file. Its size is compared with the size in the store, its SHA-256 checksum with that of the
        received bytes and with `checksum`, if given. The file appears under its name only when it is complete."""
        part = file.with_name(f".{file.name}.{os.getpid()}.part")

        def download() -> None:
            size = self._files.info(self._path(name))["size"]
            with self._files.open(self._path(name), "rb", block_size=_BLOCK) as stored, part.open("wb") as local:
                received, _ = _sha256(stored, copy=local)
            with part.open("rb") as local:
                found, length = _sha256(local)
            if length != size or found != received or checksum not in (None, found):
                raise ChecksumError("the content differs from what was uploaded")
            part.replace(file)

        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._repeat("download", name, download)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def delete(self, name: str) -> None:
        def delete() -> None:
            with suppress(FileNotFoundError):
                self._files.rm_file(self._path(name))

        self._repeat("delete", name, delete)

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def _replace(self, name: str, write: Callable[[str], object]) -> None:
        """Call `write` such that a reader never sees an incomplete file. Object stores have this property."""
        path = self._path(name)
        if not self._is_local:
            write(path)
            return
        folder, _, last = path.rpartition("/")
        part = f"{folder}/.{last}.{os.getpid()}.part"
        os.makedirs(folder, exist_ok=True)
        try:
            write(part)
            os.replace(part, path)
        finally:
            with suppress(OSError):
                os.unlink(part)

    def _repeat(self, verb: str, name: str, transfer: Callable[[], T], remedy: str = "") -> T:
        for wait in (*BACKOFF_SECONDS, None):
            try:
                return transfer()
            except Exception as error:
                # Each store has its own errors for connections, permissions and timeouts.
                if wait is None or isinstance(error, _PERMANENT):
                    where = f"{self.url}/{name}" if name else self.url
                    raise StorageError(f"cannot {verb} {where}: {_reason(error)}{remedy}") from error
                time.sleep(wait)
        raise AssertionError


class Uploads:
    """Uploads files to a folder, and again when they have changed."""

    def __init__(self, upload: Callable[[Path, str], str | None]):
        """`upload` is that of a `Folder`."""
        self._upload = upload
        self._versions = dict[str, tuple[int, ...]]()
        """State of each file when it was uploaded."""

    def upload(self, file: Path, name: str) -> str | None:
        """Upload a file. Return its checksum, or None if it was uploaded before or was removed."""
        try:
            found = file.stat()
        except FileNotFoundError:
            return None
        version = found.st_ino, found.st_size, found.st_mtime_ns
        if self._versions.get(name) == version:
            return None
        checksum = self._upload(file, name)
        if checksum is not None:
            self._versions[name] = version
        return checksum


def check_url(url: str) -> str:
    """Return the URL. Raise UserError if its scheme is unknown or if it contains credentials."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = None
    if parts is None or not url.isprintable():
        raise UserError("a URL is invalid: give SCHEME://PLACE/FOLDER, for example s3://bucket/run")
    # The error does not repeat a URL that may hold a secret.
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise UserError(
            f"a {parts.scheme}:// URL contains credentials or a query: give only {parts.scheme}://PLACE/FOLDER, and "
            "credentials in environment variables such as AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if parts.scheme not in _PACKAGES:
        raise unknown("URL scheme", parts.scheme, _PACKAGES)
    if parts.scheme == "file" and parts.netloc:
        raise UserError(f"{url} names the host {parts.netloc!r}: write three slashes, file:///FOLDER")
    if not parts.path.strip("/"):
        raise UserError(f"{url} names no folder: add one, such as {url.rstrip('/')}/run")
    return url


def check_installed(url: str) -> None:
    """Raise UserError if the package for the scheme of a URL is not installed."""
    try:
        get_filesystem_class(urlsplit(url).scheme)
    except ImportError:
        raise _not_installed(url) from None


def _not_installed(url: str) -> UserError:
    scheme = urlsplit(url).scheme
    return UserError(f"{url}: {scheme}:// needs a package: pip install {_PACKAGES[scheme]}")


def upload(source: Path, url: str, regex: str = "") -> None:
    """Upload a file or a directory to the folder `url`. With a regular expression, upload only the files whose relative
    path matches it."""
    folder = Folder(url)
    for file, name in matching_files(source, regex):
        folder.upload(file, name)


def matching_files(source: Path, regex: str) -> list[tuple[Path, str]]:
    """Return a file, or the complete files of a directory, with the relative paths whose beginning matches the regular
    expression."""
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    names = [(file, file.name if file == source else file.relative_to(source).as_posix()) for file in files]
    return [(file, name) for file, name in names if re.match(regex, name) and not _PART.search(name)]


def download(url: str, target: Path, regex: str = "") -> None:
    """Download a file, or all files of a folder, to the directory `target`. With a regular expression, download only
    the files whose relative path matches it. Raise NothingStoredError if there are no files at the URL."""
    folder = Folder(url)
    names = {name: name for name in folder.listing()}
    if not names and folder.is_file():
        names = {"": folder.url.rpartition("/")[2]}
    if not names:
        raise NothingStoredError(f"no files at {url}")
    for name, local_name in names.items():
        if re.match(regex, local_name):
            folder.download(name, target / local_name)


def _sha256(file: BinaryIO | Any, length: int | None = None, copy: BinaryIO | None = None) -> tuple[str, int]:
    """Return the checksum and the length of a file, or of its first `length` bytes. Write what is read to `copy`."""
    digest, done = hashlib.sha256(), 0
    while block := file.read(_BLOCK if length is None else min(_BLOCK, length - done)):
        digest.update(block)
        done += len(block)
        if copy:
            copy.write(block)
    return digest.hexdigest(), done


def _reason(error: Exception) -> str:
    return one_line(error) if str(error) else type(error).__name__
