"""The digest: parts in any order and of any shape add up, and nothing that changes goes unseen."""

from __future__ import annotations

import itertools
import json
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.transfer import factors, sums
from actors.transfer.digest import Part, coverage, digest, digest_all, parts_of, whole
from actors.transfer.region import Region, Shape, grid, row_major
from orchestrator.errors import TransferError

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.bool,
]
SHAPES = [(), (1,), (7,), (1, 5), (4, 6), (6, 1), (3, 4, 5)]
MASK = (1 << 64) - 1


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Every bit random, except that a bool is 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), generator=generator)
    return raw.to(torch.uint8).view(dtype).view(shape)


def part(tensor: torch.Tensor, region: Region, shape: Shape) -> Part:
    return parts_of([("w", region, tensor)], {"w": shape})["w"]


def mixed(seed: int, index: int) -> int:
    """Splitmix64, made odd."""
    z = (index * 0x9E3779B97F4A7C15 + seed) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def by_hand(tensor: torch.Tensor) -> str:
    """The definition, one element at a time."""
    matrix = tensor.contiguous().reshape(-1, tensor.shape[-1] if tensor.ndim else 1)
    wide = tensor.element_size() >= 4
    kinds = {1: torch.int8, 2: torch.int16}
    kind = torch.uint8 if tensor.dtype is torch.bool else kinds.get(tensor.element_size())
    words = matrix.view(torch.int32 if wide else kind).tolist()
    total = 0
    for r, row in enumerate(words):
        inner = sum(mixed(factors.COLUMNS, c) * x for c, x in enumerate(row))
        total += mixed(factors.ROWS, r) * inner
    return f"{total & MASK:016x}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_what_the_definition_says(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random(shape, dtype)
    assert digest("w", tensor) == by_hand(tensor)
    spread = torch.empty((*shape, 2), dtype=dtype).select(-1, 0)
    spread.copy_(tensor)
    assert digest("w", spread) == by_hand(tensor), "strides do not matter"


def test_it_never_changes() -> None:
    """Trainer and engine may run different releases of torch, not different digests."""
    known = {"w": "825649bb8f55cc82", "s": "0b72e92ebec00000"}
    tensors = {"w": torch.arange(12, dtype=torch.int16).view(3, 4), "s": torch.tensor(3.0)}
    assert digest_all(tensors.items()) == known
    assert list(digest_all(reversed(tensors.items()))) == ["s", "w"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_single_bit_counts(dtype: torch.dtype) -> None:
    tensor = random((2, 3), dtype)
    seen = {digest("w", tensor)}
    raw = tensor.view(-1).view(torch.uint8)
    for byte in range(len(raw)):
        for bit in [0] if dtype is torch.bool else range(8):
            raw[byte] ^= 1 << bit
            seen.add(digest("w", tensor))
            raw[byte] ^= 1 << bit
    assert len(seen) == 1 + len(raw) * (1 if dtype is torch.bool else 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_what_else_may_go_wrong_with_a_tensor_is_seen(dtype: torch.dtype) -> None:
    tensor = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).mul(50).to(dtype)
    variants = {
        "sent": tensor,
        "rows swapped": tensor[[1, 0, *range(2, 8)]],
        "columns swapped": tensor[:, [1, 0, 2, 3, 4, 5]],
        "negated": -tensor,
        "zeroed": torch.zeros_like(tensor),
        "half zeroed": torch.cat([tensor[:4], torch.zeros_like(tensor[4:])]),
        "halves swapped": torch.cat([tensor[4:], tensor[:4]]),
        "shifted": tensor.view(-1).roll(1).view(8, 6),
        "transposed": tensor.t().reshape(8, 6),
        "rounded": tensor.to(torch.float8_e4m3fn).to(dtype) + 1,
    }
    assert len({digest("w", variant) for variant in variants.values()}) == len(variants)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_parts_add_up(data: st.DataObject) -> None:
    """Cut along any dimensions, held in any layout, summed in any order."""
    shape = tuple(data.draw(st.lists(st.integers(1, 5), max_size=4)))
    dtype = data.draw(st.sampled_from(DTYPES))
    tensor = random(shape, dtype, data.draw(st.integers(0, 99)))
    pieces = [tensor]
    for dim, size in enumerate(shape):
        if size > 1 and data.draw(st.booleans()):
            if data.draw(st.booleans()):
                at = data.draw(st.integers(1, size - 1))
                cuts = [slice(0, at), slice(at, size)]
            else:
                cuts = [slice(0, size, 2), slice(1, size, 2)]
            index = (slice(None),) * dim
            pieces = [piece[(*index, cut)] for piece in pieces for cut in cuts]
    live = []
    for piece in data.draw(st.permutations(pieces)):
        piece = piece.permute(data.draw(st.permutations(range(piece.ndim))))
        region = Region(int(piece.storage_offset()), tuple(piece.shape), piece.stride())
        assert region.of(tensor).data_ptr() == piece.data_ptr()
        held = piece.contiguous() if data.draw(st.booleans()) else piece.clone()
        live.append(("w", region, held))
    found = parts_of(live, {"w": shape})["w"]
    assert f"{found.value:016x}" == digest("w", tensor)
    assert (found.elements, found.coverage) == (
        tensor.numel(),
        coverage(Region.whole(shape), shape),
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_fast_way_and_the_slow_way_agree(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    tensor = random(shape, data.draw(st.sampled_from(DTYPES)))
    index = tuple(
        slice(data.draw(st.integers(0, n - 1)), None, data.draw(st.integers(1, 2))) for n in shape
    )
    view = tensor[index]
    if data.draw(st.booleans()) and view.is_contiguous():
        view = view.view(-1)
    region = Region(int(view.storage_offset()), tuple(view.shape), view.stride())
    expected = part(view, region, shape), coverage(region, shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sums, "grid", lambda *_: None)
        assert (part(view, region, shape), coverage.__wrapped__(region, shape)) == expected


@pytest.mark.parametrize(
    ("region", "shape"),
    [
        (Region(8, (2, 4), (4, 1)), (6, 4)),
        (Region(1, (6, 2), (4, 1)), (6, 4)),
        (Region(0, (4, 6), (1, 4)), (6, 4)),
        (Region(4, (8,), (1,)), (6, 4)),
        (Region(5, (2,), (1,)), (6, 4)),
        (Region(0, (6, 2, 2), (4, 2, 1)), (6, 4)),
        (Region(0, (3, 2, 5), (20, 5, 1)), (3, 4, 5)),
        (Region(2, (6,), (4,)), (6, 4)),
        (Region(0, (), ()), ()),
    ],
    ids=str,
)
def test_slices_as_loaders_make_them_take_the_fast_way(
    region: Region, shape: tuple[int, ...]
) -> None:
    assert grid(region, shape) is not None


@pytest.mark.parametrize("cuts", [(5, 9), (1, 19), (6, 13), (7, 8), (12, 18)])
def test_runs_may_begin_and_end_inside_rows(cuts: tuple[int, int]) -> None:
    tensor = random((4, 6), torch.bfloat16)
    edges = (0, *cuts, 24)
    live = [
        ("w", Region(a, (b - a,), (1,)), tensor.view(-1)[a:b]) for a, b in itertools.pairwise(edges)
    ]
    assert f"{parts_of(live, {'w': (4, 6)})['w'].value:016x}" == digest("w", tensor)


def test_long_rows_and_large_tables_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [random((5, 37), torch.float64), random((91,), torch.bfloat16)]
    expected = [digest("w", tensor) for tensor in tensors]
    monkeypatch.setattr(sums, "_HOST_CHUNK", 8)
    monkeypatch.setattr(factors, "_CACHED", 4)
    assert [digest("w", tensor) for tensor in tensors] == expected


def test_threads_do_not_disturb_each_other() -> None:
    tensors = {f"w{i}": random((64, 32 + i), torch.bfloat16, i) for i in range(16)}
    expected = digest_all(tensors.items())
    factors._table.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: digest_all(tensors.items()) == expected, range(16)))


def test_a_region_held_twice_counts_once_and_must_be_equal() -> None:
    tensor, shapes = random((4, 6), torch.bfloat16), {"w": (4, 6)}
    region = Region.whole((4, 6))
    twice = [("w", region, tensor), ("w", region, tensor.clone())]
    assert parts_of(twice, shapes) == parts_of(twice[:1], shapes)
    twice[1][2][0, 0] += 1
    with pytest.raises(TransferError, match="'w' is held twice, and the two are not equal"):
        parts_of(twice, shapes)


def rank_parts(tensor: torch.Tensor, *cuts: slice) -> dict[str, Part]:
    live = [
        ("w", Region(cut.start * 6, (cut.stop - cut.start, 6), (6, 1)), tensor[cut]) for cut in cuts
    ]
    return parts_of(live, {"w": (4, 6)})


def test_slices_and_replicas_of_several_ranks_make_the_whole() -> None:
    tensor, shapes = random((4, 6), torch.bfloat16), {"w": (4, 6)}
    upper, lower = rank_parts(tensor, slice(0, 2)), rank_parts(tensor, slice(2, 4))
    expected = {"w": digest("w", tensor)}
    full = rank_parts(tensor, slice(0, 1), slice(1, 4))
    assert whole("e", shapes, {1: full}) == expected
    assert whole("e", shapes, {1: full, 2: full}) == expected
    assert whole("e", shapes, {1: upper, 2: upper, 3: lower, 4: lower}) == expected
    for answers in ({1: upper}, {1: upper, 2: upper}, {1: upper, 2: full}, {1: {}}):
        with pytest.raises(TransferError, match=r"not wholly held by the ranks .* of engine e: w"):
            whole("e", shapes, answers)


def test_replicas_that_differ_are_named_with_the_tensors() -> None:
    shapes = {"a": (4, 6), "w": (4, 6)}
    one, other = (random((4, 6), torch.bfloat16, seed) for seed in (1, 2))
    same = rank_parts(one, slice(0, 4))["w"]
    answers = {
        1: {"a": same, "w": same},
        4: {"a": same, "w": rank_parts(other, slice(0, 4))["w"]},
    }
    with pytest.raises(
        TransferError, match=r"ranks 1 and 4 of engine e hold different weights: w$"
    ):
        whole("e", shapes, answers)


def test_parts_travel_as_plain_json() -> None:
    held = part(torch.tensor([-1.0]), Region.whole((1,)), (1,))
    assert Part.of_wire(json.loads(json.dumps(held))) == held
    for row in (
        [],
        [0, 1],
        ["1", 1, 1],
        [None, 1, 1],
        [1.0, 1, 1],
        [True, 1, 1],
        [1, 1, 1, 1],
        None,
        5,
        {},
    ):
        with pytest.raises(TransferError, match="malformed part"):
            Part.of_wire(row)


def test_elements_must_be_those_of_the_region() -> None:
    with pytest.raises(TransferError, match="are not those of Region"):
        part(torch.zeros(3, 2), Region(0, (2, 3), (3, 1)), (4, 3))


def test_row_major_strides() -> None:
    for shape in SHAPES:
        assert row_major(shape) == torch.empty(shape).stride()


def test_coverage_is_added_modulo_two_to_the_64th() -> None:
    """Parts may cover more than that together."""
    shape, tensor = (64, 8), torch.arange(512, dtype=torch.int32).view(64, 8)
    rows = [(n, Region(8 * n, (8,), (1,)), tensor[n]) for n in range(64)]
    parts = [parts_of([("w", region, row)], {"w": shape}) for _, region, row in rows]
    assert sum(held["w"].coverage for held in parts) >= 2**64
    assert whole("e", {"w": shape}, dict(enumerate(parts))) == {"w": digest("w", tensor)}
    one = parts_of([("w", region, row) for _, region, row in rows], {"w": shape})
    assert one == {"w": part(tensor, Region.whole(shape), shape)}
