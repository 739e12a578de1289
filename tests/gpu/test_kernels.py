"""The kernels do what torch's operations do, on every kind of memory."""

from __future__ import annotations

import pytest
import torch

from actors.transfer import beside, runs, sums, tiles, waiting
from actors.transfer.aside import Answer, Aside
from actors.transfer.region import Region
from actors.transfer.sums import Held, Sums

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]
SHAPES = [(1,), (9000,), (37, 300), (64, 512), (3, 50, 264), (1, 20000)]
DTYPES = [*sorted(tiles.Matrix.dtypes, key=str), torch.float64, torch.bool]


def memory(dtype: torch.dtype, seed: int) -> list[Held]:
    """Whole tensors, slices and transposed ones, with every bit random."""
    generator = torch.Generator().manual_seed(seed)
    held: list[Held] = []
    for shape in SHAPES:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        top = 2 if dtype is torch.bool else 256
        raw = torch.randint(0, top, (nbytes,), generator=generator).to(torch.uint8)
        whole = raw.view(dtype).view(shape).cuda()
        turned = whole.mT if whole.ndim > 1 else whole
        for view in (whole, whole[..., 1:], whole[len(whole) // 2 :], turned):
            if view.numel():
                region = Region(int(view.storage_offset()), tuple(view.shape), view.stride())
                held.append((view, region, shape))
    return held


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_adds_right(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    held = memory(dtype, 0)
    assert tiles.usable(held[0][0].device)
    fast = Sums(held)
    found = fast.run()
    monkeypatch.setattr(sums, "usable", lambda device: False)
    assert found == Sums(held).run()
    assert found == Sums([(t.cpu(), region, shape) for t, region, shape in held]).run()
    held[0][0].view(torch.uint8).bitwise_xor_(1)
    assert fast.run()[0] != found[0] and fast.run()[-1] == found[-1]


def test_the_copy_kernel_copies_runs_of_any_length() -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for count in (8, 4096, 32768, 32776, 100_000):
        source = torch.randint(-32768, 32767, (count,), generator=generator, dtype=torch.int16)
        on_gpu = source.cuda().view(torch.bfloat16)
        pairs.append((torch.zeros(count + 8, dtype=torch.bfloat16, device="cuda")[:count], on_gpu))
        assert runs.fits(*pairs[-1])
    assert runs.usable(pairs[0][0].device)
    runs.Runs(pairs).run()
    for target, source in pairs:
        assert torch.equal(target.view(torch.int16), source.view(torch.int16))
        beyond = target.as_strided((8,), (1,), target.numel())
        assert not beyond.any()


@pytest.mark.parametrize("nbytes", [0, 5, beside.PIECE, 2 * beside.PIECE + 7])
def test_a_copy_beside_decoding_is_there_on_return(nbytes: int) -> None:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.zeros(nbytes + 64, dtype=torch.uint8, device="cuda")
    rests: list[float] = []
    torch.cuda.synchronize()
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        torch.cuda._sleep(50_000_000)
        beside.copy_beside(target[:nbytes], source, rests.append)
    assert aside.query()
    assert rests == [beside.REST_S] * (max(0, nbytes - 1) // beside.PIECE)
    assert torch.equal(target[:nbytes], source)
    assert not target[nbytes:].any()


def test_what_comes_to_the_host_is_what_the_device_had_computed_by_then() -> None:
    on_device = torch.zeros(310, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for value in (7, 8):  # the second lands in the pinned memory of the first
            torch.cuda._sleep(50_000_000)
            on_device.fill_(value)
            assert waiting.to_host(on_device).tolist() == [value] * 310


def test_work_aside_is_done_when_the_device_is_done_with_it() -> None:
    device = torch.device("cuda", 0)
    target = torch.zeros(1000, device=device)
    torch.cuda.synchronize()
    seen: list[list[float]] = []
    side = torch.cuda.Stream()

    def work() -> Answer:
        torch.cuda._sleep(50_000_000)
        target.fill_(3.0)
        return {}

    def done(answer: Answer) -> None:
        assert answer == {}
        with torch.cuda.stream(side):  # waits for nobody
            seen.append(target.cpu().unique().tolist())

    aside = Aside(device)
    aside.start("test", work, done)
    aside.finish()
    assert seen == [[3.0]]


def test_work_aside_leaves_alone_what_a_queued_copy_still_reads() -> None:
    device = torch.device("cuda", 0)
    buffer, model = torch.full((1000,), 1.0, device=device), torch.zeros(1000, device=device)
    aside = Aside(device)
    torch.cuda.synchronize()

    def prefetch() -> Answer:
        buffer.fill_(2.0)
        return {}

    torch.cuda._sleep(50_000_000)
    model.copy_(buffer)
    aside.start("test", prefetch)
    aside.finish()
    torch.cuda.synchronize()
    assert buffer.unique().tolist() == [2.0] and model.unique().tolist() == [1.0]
