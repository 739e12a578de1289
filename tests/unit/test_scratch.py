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
