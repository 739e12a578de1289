"""Groups of broadcasts over real sockets: straight into place, or through the bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from actors.transfer.groups import receive_groups, send_groups, undirected_bytes
from actors.transfer.layout import Layout, Slot, schedule, view
from actors.transfer.link import GlooLink, Link, Pending
from actors.transfer.rendezvous import Rendezvous
from orchestrator.errors import ChannelError, TransferError
from orchestrator.types import TensorSpec

TIMEOUT_S = 30.0
RANKS = 3
BUCKET = 4096


def spec(name: str, dtype: torch.dtype, *shape: int) -> TensorSpec:
    numel = torch.Size(shape).numel()
    return TensorSpec(name, str(dtype).removeprefix("torch."), shape, numel * dtype.itemsize)


LAYOUT = Layout.of(
    [
        spec("direct", torch.float32, 10, 20),
        spec("cast", torch.bfloat16, 30, 7),
        spec("scalar", torch.float32),
        spec("sliced", torch.float32, 12, 40),
        spec("huge", torch.float32, 70, 33),
        spec("unused", torch.int8, 555),
        *(spec(f"layer.{i}", torch.bfloat16, 16, 16) for i in range(40)),
    ]
)
SCHEDULE = schedule(LAYOUT, BUCKET)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


@pytest.fixture
def links(threads: ThreadPoolExecutor) -> Iterator[list[Link]]:
    host = Rendezvous.host("127.0.0.1", "groups", TIMEOUT_S)

    def join(rank: int) -> Link:
        return GlooLink(host, rank, RANKS, TIMEOUT_S, "127.0.0.1")

    made: list[Link] = list(threads.map(join, range(RANKS)))
    yield made
    for link in made:
        link.close()
    host.stop()


class Model:
    """What a worker with half of ``sliced`` holds."""

    def __init__(self) -> None:
        self.fused = torch.full((26, 20), -1.0)
        self.cast = torch.full((30, 7), -1.0)
        self.half = torch.full((12, 20), -1.0)
        self.others = {
            slot.spec.name: view(torch.zeros(LAYOUT.nbytes, dtype=torch.uint8), slot)
            for slot in LAYOUT.slots
        }
        self.passed: list[str] = []

    def place(self, slot: Slot) -> torch.Tensor | None:
        name = slot.spec.name
        if name == "direct":
            return self.fused[13:23]
        # Every third layer takes the detour, so that groups are mixed.
        through = ("cast", "sliced", "unused", *(f"layer.{i}" for i in range(0, 40, 3)))
        return None if name in through else self.others[name]

    def landed(self, slot: Slot, arrived: torch.Tensor) -> None:
        name = slot.spec.name
        self.passed.append(name)
        if name == "cast":
            self.cast.copy_(arrived)
        elif name == "sliced":
            self.half.copy_(arrived[:, 20:])
        elif name != "unused":
            self.others[name].copy_(arrived)


def staged(seed: int) -> torch.Tensor:
    # Bytes that are no NaN in any dtype: comparable.
    return torch.randint(1, 60, (LAYOUT.nbytes,), generator=torch.Generator().manual_seed(seed)).to(
        torch.uint8
    )


def start(
    threads: ThreadPoolExecutor, links: Sequence[Link], buffer: torch.Tensor, models: list[Model]
) -> list[Future[None]]:
    def receive(link: Link, model: Model) -> None:
        bucket = torch.zeros(undirected_bytes(SCHEDULE, model.place), dtype=torch.uint8)
        assert 0 < bucket.numel() <= BUCKET
        receive_groups(link, SCHEDULE, model.place, bucket, model.landed)

    sending = threads.submit(send_groups, links[0], SCHEDULE, buffer)
    return [
        sending,
        *(threads.submit(receive, *pair) for pair in zip(links[1:], models, strict=True)),
    ]


def test_every_rank_has_every_tensor_in_its_place(
    threads: ThreadPoolExecutor, links: list[Link]
) -> None:
    models = [Model() for _ in links[1:]]
    for seed in (1, 2, 1):
        buffer = staged(seed)
        sent = dict(LAYOUT.views(buffer))
        for future in start(threads, links, buffer, models):
            future.result(TIMEOUT_S)
        for model in models:
            assert torch.equal(model.fused[13:23], sent["direct"])
            assert torch.equal(model.cast, sent["cast"].float())
            assert torch.equal(model.half, sent["sliced"][:, 20:])
            for name in ("scalar", "huge", *(f"layer.{i}" for i in range(40))):
                assert torch.equal(model.others[name], sent[name]), name
            # Nothing around a destination was touched, nothing direct took the detour.
            assert (model.fused[:13] == -1).all() and (model.fused[23:] == -1).all()
            assert "direct" not in model.passed and "huge" not in model.passed


def test_the_bucket_holds_what_the_fullest_group_passes_on() -> None:
    assert undirected_bytes(SCHEDULE, lambda slot: None) >= 33 * 70 * 4
    assert undirected_bytes(SCHEDULE, lambda slot: torch.empty(0)) == 0


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        (torch.zeros(10, 20, dtype=torch.float64), r"'direct' is float32 \[10, 20\].*float64"),
        (torch.zeros(10, 21), r"its place is torch.float32 \[10, 21\]"),
        (torch.zeros(20, 10).t(), "only contiguous"),
    ],
)
def test_a_place_that_does_not_fit_is_refused_before_anything_is_received(
    target: torch.Tensor, problem: str
) -> None:
    class Untouched(Link):
        def broadcast(self, buffer: torch.Tensor) -> Pending:
            raise AssertionError("received")

        def close(self) -> None: ...

    def place(slot: Slot) -> torch.Tensor | None:
        return target if slot.spec.name == "direct" else None

    bucket = torch.zeros(undirected_bytes(SCHEDULE, place), dtype=torch.uint8)
    with pytest.raises(TransferError, match=problem):
        receive_groups(Untouched(), SCHEDULE, place, bucket, lambda slot, arrived: None)


def test_a_bucket_that_is_too_small_is_refused(links: list[Link]) -> None:
    with pytest.raises(TransferError, match="has no room for tensor"):
        receive_groups(
            links[1], SCHEDULE, lambda slot: None, torch.zeros(64, dtype=torch.uint8), print
        )


def test_a_rank_that_leaves_fails_the_others(
    threads: ThreadPoolExecutor, links: list[Link]
) -> None:
    big = Layout.of([spec("w", torch.uint8, 64 << 20), spec("v", torch.uint8, 64 << 20)])
    groups = schedule(big, 1 << 20)
    sending = threads.submit(
        send_groups, links[0], groups, torch.zeros(big.nbytes, dtype=torch.uint8)
    )
    for link in links[1:]:
        link.close()
    assert isinstance(sending.exception(TIMEOUT_S), ChannelError)


class Queue:
    """A device stream: work runs in order when it is waited for, not when it is given."""

    def __init__(self) -> None:
        self.log: list[str] = []


class OrderedLink(Link):
    """Notes in which order a device would see things."""

    def __init__(self, queue: Queue, ordered: bool) -> None:
        self._log, self._ordered, self._count = queue.log, ordered, 0

    def broadcast(self, buffer: torch.Tensor) -> Callable[[], None]:
        raise AssertionError("one by one")

    def broadcast_many(self, buffers: Sequence[torch.Tensor]) -> Pending:
        number, self._count = self._count, self._count + 1
        self._log.append(f"receive {number}")
        return Pending(
            lambda: self._log.append(f"wait {number}"),
            (lambda: self._log.append(f"order {number}")) if self._ordered else None,
        )

    def close(self) -> None: ...


@pytest.mark.parametrize("ordered", [True, False])
def test_copies_out_of_the_bucket_come_between_two_groups_that_fill_it(ordered: bool) -> None:
    queue = Queue()
    layout = Layout.of([spec(name, torch.uint8, 64) for name in ("a", "direct", "b")])
    target = torch.zeros(64, dtype=torch.uint8)
    receive_groups(
        OrderedLink(queue, ordered),
        schedule(layout, 64),
        lambda slot: target if slot.spec.name == "direct" else None,
        torch.zeros(64, dtype=torch.uint8),
        lambda slot, arrived: queue.log.append(f"copy {slot.spec.name}"),
    )
    if ordered:
        # On a device nobody waits before the end.
        assert queue.log == [
            *("receive 0", "order 0", "copy a", "receive 1", "receive 2", "order 2", "copy b"),
            *("wait 0", "wait 1", "wait 2"),
        ]
    else:
        assert queue.log == [
            *("receive 0", "wait 0", "copy a", "receive 1", "receive 2", "wait 2", "copy b"),
            "wait 1",
        ]
