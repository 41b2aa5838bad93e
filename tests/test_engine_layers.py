"""FA3^c and FlashInfer^c as layers of the vLLM plugin, with the libraries' kernels replaced on a CPU."""

import pytest
import torch

from baselines import engine_layers
from moira_kernels import PagedKV
from moira_kernels.pipeline import DecodeLayer
from moira_kernels.testing import Geometry, make_case, max_abs_error
from tests.test_baselines import stand_in_fa3, stand_in_flashinfer  # noqa: F401
from tests.test_pipeline import full_pages

GEOMETRY = Geometry(8, 2, 64)
LENGTHS = [900, 64, 0, 1, 130, 65]


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("name", engine_layers.LAYERS)
def test_same_lists_and_output_as_attend(name, layout, device, has_gpu, request):
    if not has_gpu:
        request.getfixturevalue(f"stand_in_{name}")
    q, kv = make_case(LENGTHS, GEOMETRY, layout=layout, device=device)
    ours = DecodeLayer.allocate(kv, 8)
    theirs = engine_layers.LAYERS[name].allocate(kv, 8)
    counts = torch.tensor([3, 5], dtype=torch.int32, device=device)
    other = theirs.sibling(kv)
    for layer in (ours, theirs, other):
        layer.prefill(kv, full_pages(kv))
    # A query as vLLM gives it, a view of a wider tensor; then other lengths, fewer rows, another layer.
    wide = torch.cat([3 * q, q, q], dim=1)
    for layer, rule in ((theirs, {"gamma": 0.8}), (theirs, {"counts": counts}), (other, {"gamma": 0.95})):
        for batch in (len(LENGTHS), 3):
            part = PagedKV(kv.k, kv.v, kv.block_table[:batch], kv.seq_lens[:batch])
            query = wide[:batch, :8]
            out = torch.full((batch, 8, 64), float("nan"), dtype=q.dtype, device=device)
            want = ours.run(query.contiguous(), part, **rule)
            layer.run(query, part, out=out, **rule)
            assert torch.equal(layer.pages.lengths[:batch], ours.pages.lengths[:batch])
            assert max_abs_error(out, want) < 2e-2
            assert (out[2] == 0).all()
