"""What lies in a cache is used where it is whole and ours; else it is made again, and no link is followed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.checkpoints import gguf_cache, trusted_cache
from tandem.checkpoints.locate import Checkpoint, CheckpointError, find
from tandem.checkpoints.trusted_cache import Untrusted, hash_file, locked, private_folder, seal, seal_error
from tandem.runners.native import compilation
from tests.support import REPOSITORY

NEEDS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
NOBODY = 65534


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TANDEM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def sealed(folder: Path) -> tuple[Path, Path]:
    """A note and a file that it seals."""
    folder = private_folder(folder)
    file = folder / "made"
    file.write_bytes(b"machine code")
    seal(folder / "note.json", [file])
    return folder / "note.json", file


def empty(file: Path) -> None:
    file.write_bytes(b"")


def half(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flipped(file: Path) -> None:
    """Same size, same time of writing."""
    status = file.stat()
    content = file.read_bytes()
    file.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def another_users(file: Path) -> None:
    os.chown(file, NOBODY, NOBODY)


def writable(file: Path) -> None:
    file.chmod(0o666)


def linked(file: Path) -> None:
    elsewhere = file.with_name("elsewhere")
    file.rename(elsewhere)
    file.symlink_to(elsewhere)


DAMAGE = {each.__name__: each for each in (empty, half, flipped, writable, linked, Path.unlink)} | {
    "another users": pytest.param(another_users, marks=NEEDS_ROOT)
}


@pytest.mark.parametrize("of", ["the file", "its note"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_what_is_damaged_or_anothers_is_not_used(tmp_path: Path, damage: Callable[[Path], None], of: str) -> None:
    note, file = sealed(tmp_path / "kept")
    assert seal_error(note) is None
    damage(file if of == "the file" else note)
    wrong = seal_error(note)
    assert wrong is not None and "\n" not in wrong and (wrong or (of == "its note" and not note.exists()))


def test_a_link_in_the_locks_place_empties_nothing(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("all of it")
    (tmp_path / "x.lock").symlink_to(precious)
    with pytest.raises(OSError), locked(tmp_path / "x.lock"):
        pass
    assert precious.read_text() == "all of it"
    os.mkfifo(tmp_path / "pipe.lock")
    with pytest.raises(Untrusted, match="is not a file"), locked(tmp_path / "pipe.lock"):
        pass


def test_a_folder_of_ours_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    modes = [private_folder(tmp_path / name).stat().st_mode & 0o777 for name in ("open", "new")]
    assert modes == [0o755, 0o700]


@NEEDS_ROOT
def test_in_a_shared_folder_of_roots_a_user_has_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a volume of Kubernetes is mounted; and what another user prepared there is refused."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    own = private_folder(shared)
    assert own == shared / f"user-{NOBODY}" and own.stat().st_mode & 0o777 == 0o700
    os.chown(own, 12345, 12345)
    with pytest.raises(Untrusted, match="belongs to another user"):
        private_folder(shared)


def test_a_hash_is_remembered_until_anything_about_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(trusted_cache, "REMEMBERED_BYTES", 4)
    monkeypatch.setattr(trusted_cache, "SETTLED_SECONDS", -1.0)
    read, original, file = list[Path](), trusted_cache._read, tmp_path / "weights"
    monkeypatch.setattr(trusted_cache, "_read", lambda *given: (read.append(file), original(*given)))
    file.write_bytes(b"12345678")
    first = hash_file(file)
    assert hash_file(file) == first and len(read) == 1
    status = file.stat()
    while file.stat().st_ctime_ns == status.st_ctime_ns:  # the file system's clock ticks
        time.sleep(0.001)
        file.write_bytes(b"1234x678")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert hash_file(file) != first and len(read) == 2
    for note in (cache / "hashes").iterdir():
        note.write_text("{")
    assert hash_file(file) != first and len(read) == 3, "a damaged note is not believed"


def test_a_file_that_was_just_written_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(trusted_cache, "REMEMBERED_BYTES", 4)
    file = tmp_path / "weights"
    file.write_bytes(b"12345678")
    os.utime(file, (time.time() + 3600, time.time() + 3600))  # however slow this machine is
    hash_file(file)
    assert list((cache / "hashes").iterdir()) == []


def test_a_file_that_changes_while_it_is_read_has_no_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"12345678")
    monkeypatch.setattr(trusted_cache, "_read", lambda *asked: os.truncate(file, 3))
    with pytest.raises(OSError, match="changed while it was read"):
        hash_file(file)


def test_a_cache_that_cannot_be_used_costs_time_and_nothing_else(tmp_path: Path, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with contextlib.suppress(OSError):
        private_folder(cache)
    file = tmp_path / "weights"
    file.write_bytes(b"12345678")
    assert hash_file(file)
    with pytest.raises(compilation.LibraryMissing):
        compilation.library_path()


def test_unpacked_weights_that_are_damaged_are_unpacked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def convert(checkpoint: Checkpoint, folder: Path) -> None:
        made.append(folder)
        (folder / "model.safetensors").write_bytes(b"weights" * 100)

    monkeypatch.setattr(gguf_cache, "convert", convert)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    packed = find(str(tmp_path / "m.gguf"))
    folder = Path(gguf_cache.unpacked(packed).folder)
    flipped(folder / "model.safetensors")
    for _ in range(2):
        assert Path(gguf_cache.unpacked(packed).folder) == folder and len(made) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights" * 100


def test_weights_that_are_replaced_while_they_are_unpacked_are_not_kept_under_the_old_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    contents = [b"GGUF 2", b"GGUF 2"]  # what another program writes while the file is read

    def convert(checkpoint: Checkpoint, folder: Path) -> None:
        file = Path(checkpoint.folder, str(checkpoint.gguf))
        file.write_bytes(contents.pop())
        (folder / "model.safetensors").write_bytes(file.read_bytes())

    monkeypatch.setattr(gguf_cache, "convert", convert)
    (tmp_path / "m.gguf").write_bytes(b"GGUF 1")
    with pytest.raises(CheckpointError, match=r"m\.gguf: was replaced or written to while it was read"):
        gguf_cache.unpacked(find(str(tmp_path / "m.gguf")))
    assert not list(cache.glob("m-*-v*/*"))
    kept = Path(gguf_cache.unpacked(find(str(tmp_path / "m.gguf"))).folder)
    assert (kept / "model.safetensors").read_bytes() == b"GGUF 2"


HOMELESS = """
import os, sys
os.setresuid(54321, os.geteuid(), os.geteuid())  # no account has it; the interpreter's files stay readable
sys.path.insert(0, sys.argv[1])
from tandem.checkpoints.trusted_cache import cache_root, private_folder
try:
    print(private_folder(cache_root() / "hashes"))
except ValueError as error:
    print(error)
"""


@NEEDS_ROOT
@pytest.mark.parametrize("there", ["nothing", "another's", "link"])
def test_without_home_and_account_the_cache_is_in_the_temporary_directory(tmp_path: Path, there: str) -> None:
    root = tmp_path / f"tandem-{os.geteuid()}"
    if there == "link":
        root.symlink_to(tmp_path)
    elif there != "nothing":
        root.mkdir()
        another_users(root)
    environment = {"PATH": os.environ["PATH"], "TMPDIR": str(tmp_path)}
    asked = [sys.executable, "-c", HOMELESS, str(REPOSITORY)]
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
    if there == "nothing":
        assert (done.stdout, root.stat().st_mode & 0o777) == (f"{root / 'hashes'}\n", 0o700)
    else:
        assert done.stdout.startswith(f"TANDEM_CACHE: name a folder for caches in it, since there is no HOME: {root} ")
        assert done.stdout.count("\n") == 1


HOMELESS_MAIN = """
import os, sys
os.setresuid(54321, os.geteuid(), os.geteuid())
sys.path.insert(0, sys.argv[1])
from tandem.cli.main import main
sys.exit(main(["--role", "target", "--target_model", "~/model", "--port", "0"]))
"""


@NEEDS_ROOT
def test_a_path_of_a_user_without_home_is_refused_in_a_line() -> None:
    asked = [sys.executable, "-c", HOMELESS_MAIN, str(REPOSITORY)]
    done = subprocess.run(asked, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        2,
        "main.py: HOME: not set, and this user has no account: name paths without ~\n",
    )
