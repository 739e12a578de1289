"""NCCL without a GPU: what is said about one that cannot be used, and how the link drives it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actors import vllm_compat
from actors.transfer import nccl, nccl_check, vllm_nccl
from actors.transfer.base import make_sender
from actors.transfer.link import BrokenLink
from actors.transfer.nccl import NcclLink
from orchestrator.errors import ChannelError, TransferError

OLD_NCCL = Path(__file__).resolve().parents[2] / "benchmarks" / "old_nccl"
SYMBOLS = ("ncclGetVersion", "ncclBroadcast", "ncclCommSuspend", "ncclCommResume")
WAIT_S = 30.0


class Library:
    """A libnccl of one version with some symbols."""

    def __init__(self, number: int, symbols: tuple[str, ...] = SYMBOLS) -> None:
        self.number = number
        for name in symbols:
            setattr(self, name, self._version())

    def _version(self) -> Any:
        def function(reference: Any) -> int:
            reference._obj.value = self.number
            return 0

        return function


def install(monkeypatch: pytest.MonkeyPatch, library: Library | None) -> None:
    """Put a stand-in for vLLM's wrapper over ``library``, which loads as vLLM's does."""

    class NCCLLibrary:
        exported_functions = tuple(SimpleNamespace(name=name) for name in SYMBOLS)

        def __init__(self) -> None:
            assert library is not None
            for function in self.exported_functions:
                getattr(library, function.name)

        def ncclGetVersion(self) -> str:
            assert library is not None
            text = str(library.number)
            return f"{text[0]}.{int(text[1:3])}.{int(text[3:])}"

    def load(name: str) -> Library:
        if library is None:
            raise OSError(f"{name}: cannot open shared object file")
        return library

    wrapper = SimpleNamespace(
        NCCLLibrary=NCCLLibrary, find_nccl_library=lambda: "/opt/nccl/libnccl.so.2"
    )
    monkeypatch.setattr(vllm_nccl, "nccl_wrapper", lambda: wrapper)
    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(vllm_compat, "vllm_version", lambda: "0.32.0")


def test_a_usable_nccl_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library(22907))
    assert nccl_check.description() == "NCCL 2.29.7"


def test_one_that_is_too_old_is_named_with_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library(22809, SYMBOLS[:2]))
    with pytest.raises(ChannelError) as caught:
        nccl_check.description()
    words = str(caught.value)
    assert "found NCCL 2.28.9 (/opt/nccl/libnccl.so.2), vLLM 0.32.0 needs 2.29.7 or later" in words
    assert "because of ncclCommSuspend, ncclCommResume" in words
    assert "pip install 'nvidia-nccl-cu" in words and "or use backend ipc" in words


def test_one_that_lacks_only_what_vllm_no_longer_asks_for_is_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, Library(22809, SYMBOLS[:2]))
    library = vllm_nccl.nccl_wrapper().NCCLLibrary
    library.exported_functions = library.exported_functions[:2]
    assert nccl_check.description() == "NCCL 2.28.9"


def test_the_benchmarks_plugin_takes_three_functions_off_vllms_list(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

    before = NCCLLibrary.exported_functions
    monkeypatch.setattr(NCCLLibrary, "exported_functions", before)  # put back afterwards
    monkeypatch.syspath_prepend(str(OLD_NCCL))
    (found,) = metadata.entry_points(group="vllm.general_plugins", name="midflight_old_nccl")
    for _ in range(2):
        found.load()()
        gone = {f.name for f in before} - {f.name for f in NCCLLibrary.exported_functions}
        assert gone == {"ncclCommSuspend", "ncclCommResume", "ncclCommQueryProperties"}
    old = Library(22809, tuple(f.name for f in NCCLLibrary.exported_functions))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: old)
    monkeypatch.setattr(NCCLLibrary, "path_to_dict_mapping", {})
    assert NCCLLibrary("/opt/nccl/old.so").ncclGetVersion() == "2.28.9"


def test_without_that_plugin_vllm_and_we_refuse_the_same_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.device_communicators import pynccl_wrapper

    lacking = {"ncclCommSuspend", "ncclCommResume", "ncclCommQueryProperties"}
    kept = (f.name for f in pynccl_wrapper.NCCLLibrary.exported_functions if f.name not in lacking)
    old = Library(22809, tuple(kept))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: old)
    monkeypatch.setattr(pynccl_wrapper, "find_nccl_library", lambda: "/opt/nccl/libnccl.so.2")
    with pytest.raises(ChannelError, match=r"2\.28\.9.*because of ncclCommSuspend, ncclCommResume"):
        nccl_check.description()


def test_a_trainers_process_loads_vllms_plugins_before_it_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm.plugins

    loaded: list[str] = []
    monkeypatch.setattr(vllm.plugins, "load_general_plugins", lambda: loaded.append("plugins"))
    assert vllm_nccl.nccl_wrapper().NCCLLibrary.exported_functions
    assert loaded == ["plugins"]


def test_settings_that_ranks_do_not_reconcile_must_be_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_nccl, "shared_nccl_env", contextlib.nullcontext)
    for name in nccl_check._MUST_AGREE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")  # each its own
    nccl_check.must_agree({})
    monkeypatch.setenv("NCCL_PROTO", "Simple")
    assert nccl_check.settings() == {"NCCL_PROTO": "Simple"}
    nccl_check.must_agree({"NCCL_PROTO": "Simple"})
    with pytest.raises(ChannelError) as caught:
        nccl_check.must_agree({"NCCL_MAX_NCHANNELS": "8"})
    words = str(caught.value)
    assert "NCCL_MAX_NCHANNELS is 8 at the trainer and unset here" in words
    assert "NCCL_PROTO is unset at the trainer and Simple here" in words and "2.29.7" in words


def test_what_vllm_pins_for_itself_does_not_count_where_nccl_lets_it_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.utils import nccl as pins

    monkeypatch.setenv("NCCL_PROTO", "LL")
    monkeypatch.setattr(pins, "_unpinned_env", {"NCCL_PROTO": None})
    assert "NCCL_PROTO" not in nccl_check.settings()
    monkeypatch.setattr(pins, "_unpinned_env", {})  # an older NCCL
    assert nccl_check.settings()["NCCL_PROTO"] == "LL"


@pytest.mark.parametrize("backend", ["nccl", "native-nccl"])
def test_a_trainer_with_an_old_nccl_does_not_wait_for_engines_to_say_so(
    monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    install(monkeypatch, Library(22809, SYMBOLS[:2]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ChannelError, match=r"found NCCL 2\.28\.9"):
        make_sender(backend, dict[str, torch.Tensor]().items)


def test_a_new_one_that_lacks_a_symbol_is_not_called_old(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Library(23001, SYMBOLS[:3]))
    with pytest.raises(ChannelError) as caught:
        nccl_check.description()
    assert "found NCCL 2.30.1" in str(caught.value)
    assert "lacks ncclCommResume that vLLM 0.32.0 needs" in str(caught.value)


def test_none_at_all_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(ChannelError, match=r"found no NCCL library.*cannot open shared object"):
        nccl_check.description()


def test_one_that_fails_for_another_reason_keeps_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install(monkeypatch, Library(22907))
    wrapper = vllm_nccl.nccl_wrapper()

    def broken(self: Any) -> None:
        raise RuntimeError("NCCL error: unhandled system error")

    monkeypatch.setattr(wrapper.NCCLLibrary, "__init__", broken)
    with pytest.raises(ChannelError, match=r"found NCCL 2\.29\.7.*but.*unhandled system error"):
        nccl_check.description()


@pytest.mark.parametrize(("disabled", "available"), [(True, False), (True, True), (False, False)])
def test_a_disabled_communicator_is_an_error(
    monkeypatch: pytest.MonkeyPatch, disabled: bool, available: bool
) -> None:
    install(monkeypatch, Library(22907))
    communicator = SimpleNamespace(disabled=disabled, available=available)
    with pytest.raises(ChannelError, match=r"rank 2: vLLM found NCCL 2\.29\.7 and disabled"):
        nccl_check.must_be_enabled(communicator, 2)
    nccl_check.must_be_enabled(SimpleNamespace(disabled=False, available=True), 2)


@pytest.mark.parametrize(
    ("number", "dotted"), [(22907, "2.29.7"), (21005, "2.10.5"), (2804, "2.8.4")]
)
def test_version_numbers(number: int, dotted: str) -> None:
    assert nccl_check._dotted(number) == dotted


class Gpu:
    """Stand-ins for torch.cuda and vLLM's communicator that note what they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.finished = threading.Event()
        """The device is done with the broadcasts."""
        self.waiting = threading.Event()
        self.disabled, self.available = False, True
        gpu = self

        class Stream:
            def __init__(self, device: object) -> None: ...

            def wait_stream(self, other: str) -> None:
                gpu.log.append(f"after {other}")

        class Event:
            def record(self, stream: Stream) -> None:
                gpu.log.append("record")

            def synchronize(self) -> None:
                gpu.waiting.set()
                assert gpu.finished.wait(WAIT_S)

        class Current(str):
            def wait_event(self, event: Event) -> None:
                gpu.log.append("current waits")

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Current("current"))
        monkeypatch.setattr(nccl_check, "description", lambda: "NCCL 2.29.7")
        monkeypatch.setattr(vllm_nccl, "nccl_unique_id", lambda: b"unique")
        monkeypatch.setattr(vllm_nccl, "nccl_communicator", self.join)

    def join(self, unique: bytes, rank: int, world: int, device: object) -> Gpu:
        self.log.append(f"join {unique!r} {rank}/{world}")
        return self

    def group_start(self) -> None:
        self.log.append("group")

    def broadcast(self, buffer: torch.Tensor, src: int, stream: object) -> None:
        self.log.append(f"broadcast {buffer.numel()} {buffer.dtype} from {src}")

    def group_end(self) -> None:
        self.log.append("end")

    def destroy(self) -> None:
        self.log.append("abort")
        self.finished.set()


class Meeting:
    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def put(self, key: str, value: str) -> None:
        self.said[key] = value

    def read(self, key: str) -> str:
        return self.said[key]


def link(meeting: Any, rank: int = 0, timeout_s: float = WAIT_S) -> NcclLink:
    return NcclLink(meeting, rank, 3, torch.device("cuda", 0), timeout_s)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    yield Gpu(monkeypatch)


def test_ranks_meet_under_the_senders_identity(gpu: Gpu) -> None:
    meeting = Meeting()
    assert link(meeting).description == "NCCL 2.29.7"
    link(meeting, 2)
    assert gpu.log == ["join b'unique' 0/3", "join b'unique' 2/3"]


def test_many_tensors_are_one_group_after_the_callers_stream(gpu: Gpu) -> None:
    made = link(Meeting())
    gpu.log.clear()
    tensors = [torch.zeros(3), torch.zeros(2, 4, dtype=torch.bfloat16)]
    pending = made.broadcast_many(tensors)
    assert gpu.log == [
        *("after current", "group", "broadcast 12 torch.uint8 from 0"),
        *("broadcast 16 torch.uint8 from 0", "end", "record"),
    ]
    assert pending.order()
    assert gpu.log[-1] == "current waits"
    gpu.finished.set()
    pending()
    with pytest.raises(TransferError, match="only contiguous"):
        made.broadcast_many([torch.zeros(2, 3).t()])


def test_a_disabled_communicator_makes_no_link(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.disabled = True
    with pytest.raises(ChannelError, match=r"rank 0: vLLM found NCCL 2\.29\.7 and disabled"):
        link(Meeting())


def test_a_rank_that_cannot_join_says_with_which_nccl(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise RuntimeError("NCCL error: invalid usage")

    monkeypatch.setattr(vllm_nccl, "nccl_communicator", refused)
    with pytest.raises(ChannelError, match=r"rank 0 cannot join over NCCL 2\.29\.7.*invalid usage"):
        link(Meeting())


def waiting(pending: Any, gpu: Gpu) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            pending()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert gpu.waiting.wait(WAIT_S)
    return thread, errors


def test_closing_ends_a_wait_that_no_peer_would(gpu: Gpu) -> None:
    made = link(Meeting())
    thread, errors = waiting(made.broadcast(torch.zeros(8, dtype=torch.uint8)), gpu)
    closing = [threading.Thread(target=made.close) for _ in range(4)]
    for one in closing:
        one.start()
    for one in (*closing, thread):
        one.join(WAIT_S)
        assert not one.is_alive()
    assert isinstance(errors[0], BrokenLink) and "was closed" in str(errors[0])
    assert gpu.log.count("abort") == 1
    with pytest.raises(BrokenLink, match="was closed"):
        made.broadcast(torch.zeros(8, dtype=torch.uint8))


def test_a_hanging_peer_ends_a_wait_after_the_timeout(gpu: Gpu) -> None:
    made = link(Meeting(), timeout_s=0.05)
    thread, errors = waiting(made.broadcast(torch.zeros(8, dtype=torch.uint8)), gpu)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert "did not finish a broadcast within 0.05 s" in str(errors[0])


def test_closing_does_not_wait_for_a_call_that_hangs(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "_LEAVE_S", 0.05)
    made = link(Meeting())
    hanging = threading.Event()

    def hang() -> None:
        hanging.set()
        if gpu.finished.wait(WAIT_S):
            gpu.log.append("ended by the abort")

    monkeypatch.setattr(gpu, "group_end", hang)
    thread = threading.Thread(target=made.broadcast, args=(torch.zeros(8, dtype=torch.uint8),))
    thread.start()
    assert hanging.wait(WAIT_S)
    made.close()
    thread.join(WAIT_S)
    assert not thread.is_alive() and "ended by the abort" in gpu.log
