import pytest
import torch

from moira_kernels import PagedKV, RaggedPages
from moira_kernels.layout import check_attention_arguments
from moira_kernels.testing import Geometry, bf16_ulp, make_case

GEOMETRY = Geometry(8, 2, 16)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_page_counts_and_last_page_lengths():
    _, kv = make_case([0, 1, 63, 64, 65, 128, 129], GEOMETRY)
    assert kv.num_pages().tolist() == [0, 1, 1, 1, 2, 2, 3]
    assert kv.last_page_len().tolist() == [0, 1, 63, 64, 1, 64, 1]


def test_layouts_hold_the_same_logical_shape():
    for layout, strides in (("nhd", (64 * 2 * 32, 32, 2 * 32, 1)), ("hnd", (64 * 2 * 32, 64 * 32, 32, 1))):
        _, kv = make_case([100], GEOMETRY, layout=layout)
        assert kv.k.shape[1:] == (2, 64, 16)
        assert kv.k.stride() == strides
        assert kv.v.data_ptr() - kv.k.data_ptr() == 16 * 2


def test_messages_name_what_was_expected():
    q, kv = make_case([100, 200], GEOMETRY)
    ids = torch.zeros(2, 2, 4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"pages.lengths: expected int32 \[2, 2\], got int64 \[2, 8\]"):
        RaggedPages(ids, torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"kv.v: expected bfloat16"):
        PagedKV(kv.k, kv.v.float(), kv.block_table, kv.seq_lens)
    with pytest.raises(ValueError, match="contiguous last dimension"):
        PagedKV(kv.k.mT.contiguous().mT, kv.v, kv.block_table, kv.seq_lens)
    with pytest.raises(ValueError, match=r"block_table: expected int32 \[2, \*\]"):
        PagedKV(kv.k, kv.v, kv.block_table[:1], kv.seq_lens)
    pages = RaggedPages(ids, torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"q: expected bfloat16 \[2, \*, 16\], got float32 \[2, 8, 16\]"):
        check_attention_arguments(q.float(), kv, pages)
    with pytest.raises(ValueError, match="q heads: expected a positive multiple of KV heads = 2, got 7"):
        check_attention_arguments(q[:, :7], kv, pages)


def test_bf16_ulp_is_the_distance_to_the_next_number():
    values = torch.tensor([1.0, 1.5, 1.99, 2.0, 0.26, 300.0])
    assert bf16_ulp(values).tolist() == [2**-7, 2**-7, 2**-7, 2**-6, 2**-9, 2.0]


def test_quantised_caches_are_refused_e6():
    _, kv = make_case([100], GEOMETRY)
    k = kv.k.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="kv.k: expected bfloat16 or float16 or float32"):
        PagedKV(k, k, kv.block_table, kv.seq_lens)


def test_fused_cache_must_be_four_dimensional():
    with pytest.raises(ValueError, match=r"num_pages, H_kv, page_size, 2D"):
        PagedKV.from_fused(torch.zeros(2, 3, 4, 5, 6), int32(0)[None], int32(1))
