import math

import pytest
import torch

from moira_kernels import merge


def test_weights_are_natural_c1():
    partials = torch.tensor([[1.0], [0.0]])
    for pair, weight in (((20.0, 5.0), 1 / (1 + math.exp(-15))), ((1.0, 0.0), 0.7310586)):
        out, lse = merge.reference(partials, torch.tensor(pair))
        assert out.item() == pytest.approx(weight, abs=1e-6)
        assert lse.item() == pytest.approx(math.log(math.exp(pair[0]) + math.exp(pair[1])), abs=1e-5)


@pytest.mark.parametrize("lse", [(-math.inf, -math.inf), (-math.inf, 3.0), (-3e4, -3e4), (-math.inf,) * 32])
@pytest.mark.parametrize("empty", [0.0, float("nan")])
def test_empty_partials_never_contribute_c6(lse, empty):
    lse = torch.tensor(lse)
    partials = torch.where(lse[:, None] == -math.inf, empty, 2.0).expand(-1, 4)
    out, total = merge.reference(partials, lse)
    assert (out == (0.0 if (lse == -math.inf).all() else 2.0)).all()
    assert total == lse.logsumexp(0)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5, 17, 40])
def test_kernel_against_reference(device, chunks):
    """One row of ``chunks`` chunks among rows of none and one, whose outputs Merge must leave alone (C2)."""
    J, G, D, C = 40, 3, 24, 2
    generator = torch.Generator().manual_seed(chunks)
    partials = torch.randn(3, J, G, D, generator=generator)
    lse = 5 * torch.randn(3, J, G, generator=generator)
    lse[1, 0, 1] = -math.inf
    partials[1, 0, 1] = float("nan")
    partials[1, chunks:] = lse[1, chunks:] = float("nan")
    lengths = torch.tensor([[0], [chunks * C], [1]], dtype=torch.int32, device=device)
    out = torch.full((3, G, D), 123.0, device=device)
    out_lse = torch.full((3, G), 123.0, device=device)
    merge.launch_eq4(partials.to(device), lse.to(device) / math.log(2), lengths, out, out_lse, C)
    assert (out[[0, 2]] == 123).all()
    assert (out_lse[[0, 2]] == 123).all()
    if chunks == 1:
        assert (out[1] == 123).all()
        return
    want, want_lse = merge.reference(partials[1, :chunks].transpose(0, 1), lse[1, :chunks].T)
    torch.testing.assert_close(out[1].cpu(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out_lse[1].cpu(), want_lse, rtol=1e-5, atol=1e-5)


def test_partials_beyond_half_precision_c9(device):
    partials = torch.zeros(1, 2, 1, 16, device=device)
    partials[0, 1] = 7e4
    lse = torch.tensor([20.03, 20.09], device=device).view(1, 2, 1) / math.log(2)
    out, out_lse = torch.empty(1, 1, 16, device=device), torch.empty(1, 1, device=device)
    merge.launch_eq4(partials, lse, torch.tensor([[2]], dtype=torch.int32, device=device), out, out_lse, 1)
    torch.testing.assert_close(out, torch.full_like(out, 7e4 / (1 + math.exp(-0.06))), rtol=1e-5, atol=0)


@pytest.mark.parametrize("pieces", [0, 2, 3, 9, 40])
def test_row_cut_by_slice_borders(device, pieces):
    """Row 1 begins in thread block 1 and goes on over ``pieces`` blocks; all other partials are NaN and never read."""
    blocks, G, D = 44, 3, 24
    generator = torch.Generator().manual_seed(pieces)
    partials = torch.full((blocks, 2, G, D), float("nan"))
    lse = torch.full((blocks, 2, G), float("nan"))
    slots = [(1 + j, int(j == 0)) for j in range(pieces)]
    for slot in slots:
        partials[slot] = torch.randn(G, D, generator=generator)
        lse[slot] = 5 * torch.randn(G, generator=generator)
    # One tile a page and ten a slice; every other row begins and ends at a border.
    first = [10, 10 * pieces - 5, 5] if pieces else [10, 10]
    lengths = torch.tensor(first + [10] * ((10 * blocks - sum(first)) // 10), dtype=torch.int32)[:, None]
    out = torch.full((len(lengths), G, D), 123.0, device=device)
    out_lse = torch.full(out.shape[:2], 123.0, device=device)
    scratch = (partials.to(device), lse.to(device) / math.log(2))
    merge.launch_balanced(*scratch, lengths.to(device), out, out_lse, page_size=16, attend_tile=16)
    merged = int(pieces > 0)
    assert (out[torch.arange(len(lengths)) != merged] == 123).all()
    if not merged:
        return
    want, want_lse = merge.reference(
        torch.stack([partials[slot] for slot in slots], 1), torch.stack([lse[slot] for slot in slots], 1)
    )
    torch.testing.assert_close(out[1].cpu(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out_lse[1].cpu(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [1, 3, 4, 16])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_launch_fits_registers(group, head_dim):
    for pieces in (0, 1, 4, 16, 500):
        tile, heads = merge.launch_shape(pieces, group, head_dim)
        assert min(64, 2 * pieces) <= tile <= 64
        assert 1 <= heads < 2 * group
        # One query head is the least, however many values that is.
        assert heads == 1 or tile * heads * head_dim <= merge.MAX_VALUES
