"""An engine's temporary folder: used by all of its processes, and nobody's leftover."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.nodes import node_id
from actors.processes import Belongings
from actors.scratch import SCRATCH_ENV, make_scratch, remove_scratch


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder. A socket's path is short, so pytest's own is too deep."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    yield folder
    shutil.rmtree(folder)


def made() -> Path:
    return Path(make_scratch()[SCRATCH_ENV])


def left(parent: Path, says: str = node_id()) -> Path:
    """A folder whose owner is gone."""
    folder = Path(tempfile.mkdtemp(prefix="midflight-", dir=parent))
    (folder / "owner").write_text(says)
    (folder / "socket").touch()
    return folder


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_an_engine_writes_to_the_temporary_folder_goes_with_it(parent: Path) -> None:
    variables = make_scratch()
    folder = Path(variables["TMPDIR"])
    assert folder.parent == parent
    assert variables["VLLM_RPC_BASE_PATH"] == variables[SCRATCH_ENV] == str(folder)
    assert variables["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{parent}/torchinductor")
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(folder / str(uuid.uuid4())))
    Belongings("here", (), frozenset(), scratch=str(folder)).remove()
    assert not folder.exists()
    Belongings("here", (), frozenset(), scratch=str(folder)).remove()


def test_no_folder_where_a_socket_in_it_would_have_too_long_a_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 70)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert make_scratch() == {} and not list(long.iterdir())


def test_a_folder_whose_owner_was_killed_goes_with_the_next_start(parent: Path) -> None:
    script = (
        "import threading\n"
        "from actors.scratch import SCRATCH_ENV, make_scratch\n"
        "print(make_scratch()[SCRATCH_ENV], flush=True)\n"
        "threading.Event().wait(60)\n"
    )
    environment = {**os.environ, "TMPDIR": str(parent), "PYTHONPATH": os.pathsep.join(sys.path)}
    owner = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        ours = made()
        assert theirs.is_dir(), "its owner lives"
    finally:
        owner.kill()
        owner.wait()
    assert theirs.is_dir()
    last = made()
    assert not theirs.exists()
    assert ours.is_dir() and last.is_dir()
    remove_scratch(str(ours))
    remove_scratch(str(last))


def test_a_folder_of_somebody_elses_making_stays(parent: Path) -> None:
    for name in ("midflight-bench-1", "midflight-abcdefgh"):
        (parent / name).mkdir()
    (parent / "midflight-abcdefgh" / "owner-early").touch()
    remove_scratch(str(made()))
    assert sorted(p.name for p in parent.iterdir()) == ["midflight-abcdefgh", "midflight-bench-1"]


def test_a_folder_of_another_machine_stays_whatever_its_lock_says(parent: Path) -> None:
    """On a shared file system a lock may be of one machine only."""
    theirs, ours = left(parent, "another-boot-id"), left(parent)
    remove_scratch(str(made()))
    assert theirs.is_dir() and not ours.exists()


@pytest.mark.parametrize("kind", ["link", "fifo", "folder", "foreign"])
def test_an_owner_that_we_did_not_write_is_left_alone(
    parent: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = left(parent)
    owner = folder / "owner"
    if kind == "foreign":
        monkeypatch.setattr("actors.scratch.os.geteuid", lambda: os.getuid() + 1)
    else:
        owner.unlink()
    if kind == "link":
        (parent / "file").write_text(node_id())
        owner.symlink_to(parent / "file")
    elif kind == "fifo":
        os.mkfifo(owner)
    elif kind == "folder":
        owner.mkdir()
    remove_scratch(str(made()))
    assert (folder / "socket").exists()


def test_a_link_to_a_folder_is_not_followed(parent: Path, tmp_path: Path) -> None:
    """Anybody may put one into the temporary folder."""
    target = left(tmp_path)
    (parent / "midflight-12345678").symlink_to(target)
    remove_scratch(str(made()))
    assert sorted(path.name for path in target.iterdir()) == ["owner", "socket"]


def test_what_could_not_be_removed_whole_is_found_again(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = left(parent)
    (folder / "sub").mkdir()
    (folder / "sub" / "file").touch()
    with monkeypatch.context() as stuck:
        stuck.setattr("actors.scratch.shutil.rmtree", lambda *_, **__: None)
        remove_scratch(str(made()))
    assert [path.name for path in folder.iterdir() if path.name != "sub"] == ["owner"]
    remove_scratch(str(made()))
    assert not folder.exists()


def test_no_descriptor_is_left_open(parent: Path) -> None:
    before = descriptors()
    for _ in range(3):
        left(parent)
        folder = made()
        assert descriptors() == before + 1, "the lock"
        remove_scratch(str(folder))
    assert descriptors() == before


def test_a_full_disk_costs_the_lock_and_not_the_engine(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    before = descriptors()
    monkeypatch.setattr("actors.scratch.os.write", full)
    folder = made()
    assert folder.is_dir() and descriptors() == before
    remove_scratch(str(folder))
    assert not folder.exists()


def test_a_file_system_without_locks_has_folders_that_only_their_owner_removes(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("actors.scratch.fcntl.flock", refuse)
    first, second = made(), made()
    assert first.is_dir() and second.is_dir()
    for folder in (first, second):
        remove_scratch(str(folder))
    assert not list(parent.iterdir())
