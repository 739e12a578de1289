"""The kernels do what torch's operations do, on every kind of memory."""

from __future__ import annotations

import pytest
import torch

from actors.transfer import beside, runs, sums, tiles
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


@pytest.mark.parametrize("programs", [None, 1, 3], ids=str)
def test_the_copy_kernel_copies_runs_of_any_length(programs: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for count in (8, 4096, 32768, 32776, 100_000):
        source = torch.randint(-32768, 32767, (count,), generator=generator, dtype=torch.int16)
        on_gpu = source.cuda().view(torch.bfloat16)
        pairs.append((torch.zeros(count + 8, dtype=torch.bfloat16, device="cuda")[:count], on_gpu))
        assert runs.fits(*pairs[-1])
    assert runs.usable(pairs[0][0].device)
    runs.Runs(pairs).run(programs)
    for target, source in pairs:
        assert torch.equal(target.view(torch.int16), source.view(torch.int16))
        beyond = target.as_strided((8,), (1,), target.numel())
        assert not beyond.any()


@pytest.mark.parametrize("nbytes", [5, 16, (3 << 20) + 7, 16 << 20])
def test_a_copy_beside_decoding_is_there_on_return(
    nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.zeros(nbytes + 64, dtype=torch.uint8, device="cuda")
    assert runs.usable(source.device)
    ran: list[int] = []
    run = runs.Runs.run

    def noted(table: runs.Runs, programs: int) -> None:
        ran.append(programs)
        run(table, programs)

    monkeypatch.setattr(runs.Runs, "run", noted)
    torch.cuda.synchronize()
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        torch.cuda._sleep(50_000_000)
        beside.copy_beside(target[:nbytes], source)
    assert aside.query()
    assert ran == ([beside.PROGRAMS] if nbytes >= 16 else [])
    assert torch.equal(target[:nbytes], source)
    assert not target[nbytes:].any()
