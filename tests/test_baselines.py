"""The arms: on a CPU those that run there, and the list surgery and kernels of the others in Triton's interpreter."""

import sys
import types

import pytest
import torch

import baselines
from baselines import fa3, flashinfer_decode, flashinfer_fullwidth, page_sets, sequences
from baselines.fa3_varlen import FA3Varlen
from baselines.padding import Padding
from baselines.pow2_buckets import Pow2Buckets, bucket_of
from baselines.shared_list import SharedList
from moira_kernels import PagedKV, RaggedPages, UnsupportedError, attention, selection
from moira_kernels.testing import Geometry, assert_close, make_case, poison
from tests.test_attention import random_lists

RAGGED = [700, 1, 0, 64, 130, 1300]
"""Tokens of requests with one page, a full page, a partial one, and none."""


def ragged_lists(q, kv, seed=0, num_lists=None):
    """Lists of very different lengths: every row keeps its own share of the pages, first and current page included."""
    generator = torch.Generator().manual_seed(seed)
    num_lists = num_lists or kv.num_kv_heads
    share = torch.rand(kv.batch, num_lists, 1, generator=generator) ** 2
    keep = torch.rand(kv.batch, num_lists, kv.max_pages, generator=generator) < share
    last = (kv.num_pages() - 1).clamp(min=0).long().cpu()
    keep[:, :, 0] = True
    keep.scatter_(2, last[:, None, None].expand(-1, num_lists, 1), True)
    return selection.compact(keep.to(q.device), kv)


def page_sets_of(pages):
    """Per (request, list head): the set of page ids."""
    return [
        set(pages.page_ids[b, h, : pages.lengths[b, h]].tolist())
        for b in range(pages.batch)
        for h in range(pages.num_lists)
    ]


def check_against_float32(arm):
    """Compare with the reference over the lists that the arm says it attends."""
    lists = arm.attended()
    truth = attention.reference(arm.q, arm.kv, lists)[0]
    assert_close(arm.out, truth, attention.reference(arm.q, arm.kv, lists, dtype=arm.q.dtype)[0])


def test_names_and_descriptions_come_from_the_files():
    found = baselines.describe()
    assert {"moira", "moira-eq4", "sparse-torch", "dense-torch"} <= set(found)
    for name, arm in found.items():
        assert arm.summary.endswith((".", ")."))
        assert baselines.load(name).__name__.lower() == name.replace("-", "")


def test_needs():
    assert baselines.describe()["moira"].missing("cpu") == "needs a CUDA GPU, this run is on the cpu"
    assert baselines.describe()["dense-torch"].missing("cpu") is None
    missing = baselines.Description("x", "attention", "", ("not_a_library",)).missing("cuda")
    assert missing == "needs not_a_library, which is not installed (pip install not_a_library)"
    either = baselines.Description("x", "attention", "", ("not_a_library|flash_attn_3_",)).missing("cuda")
    assert either.startswith(
        "needs not_a_library or flash_attn_3_, which is not installed (pip install not_a_library or"
    )
    assert baselines.Description("x", "attention", "", ("not_a_library|torch",)).missing("cuda") is None


def test_unknown_arm():
    with pytest.raises(KeyError):
        baselines.load("nope")


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("name", [name for name, arm in baselines.describe().items() if set(arm.needs) <= {"cuda"}])
@pytest.mark.parametrize("seq_lens", [[192, 192], [200, 65, 0]], ids=["full", "ragged"])
def test_arm_against_reference(name, seq_lens, device):
    if reason := baselines.describe()[name].missing(device.type):
        pytest.skip(reason)
    q, kv = make_case(seq_lens, Geometry(6, 2, 32), device=device)
    pages = random_lists(q, kv, share=0.4)
    kv.k[0] = kv.v[0] = float("nan")
    arm = baselines.load(name)(q, kv, pages)
    assert arm.out.isnan().all()
    assert all(value >= 0 for value in arm.plan().values())
    arm.run()
    lists = arm.attended()
    assert page_sets.missed(lists, kv, pages) == 0
    check_against_float32(arm)
    assert arm.moved_bytes() >= int(lists.num_tokens(64).sum()) * 2 * 32 * 2
    assert torch.equal(arm.q, q)


def varlen(s):
    """What FA3 does with the same arguments, read entry by entry: page table, slot, strides of the view."""
    out = torch.zeros(s.q.shape, dtype=torch.float32)
    for n, tokens in enumerate(s.seq_lens.tolist()):
        t = torch.arange(tokens)
        page, slot = s.page_table[n, t // s.page_size].long(), t % s.page_size
        group = s.q.shape[1] // s.k.shape[2]
        for g in range(s.q.shape[1] if tokens else 0):
            keys, values = (x[page, slot, g // group].float() for x in (s.k, s.v))
            out[n, g] = torch.softmax(keys @ s.q[n, g].float() * s.q.shape[2] ** -0.5, 0) @ values
    return out


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize(("geometry", "num_lists"), [((2, 2, 16), None), ((8, 2, 16), None), ((6, 2, 16), 6)])
def test_rows_as_sequences_read_the_same_tokens(layout, geometry, num_lists):
    q, kv = make_case(RAGGED, Geometry(*geometry), layout=layout)
    pages = ragged_lists(q, kv, num_lists=num_lists)
    poison(kv, pages)
    rows = sequences.Rows(q, torch.empty_like(q), kv, pages)
    truth = attention.reference(q, kv, pages)[0]
    torch.testing.assert_close(varlen(rows.sequences).view_as(truth), truth, rtol=1e-4, atol=1e-5)
    assert rows.sequences.k.untyped_storage().data_ptr() == kv.k.untyped_storage().data_ptr()

    q, kv = make_case(RAGGED, Geometry(*geometry), layout=layout)  # without the poison
    rows = sequences.Rows(q, torch.empty_like(q), kv, pages)
    before = rows.sequences.page_table.data_ptr()
    page_sets.overwrite(pages, ragged_lists(q, kv, seed=1, num_lists=num_lists))
    rows.refresh()
    assert rows.sequences.page_table.data_ptr() == before
    truth = attention.reference(q, kv, pages)[0]
    torch.testing.assert_close(varlen(rows.sequences).view_as(truth), truth, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_rows_of_separate_caches_and_of_one_kv_head(layout):
    for heads in (1, 3):
        q, kv = make_case([200, 65], Geometry(heads * 2, heads, 16), layout=layout)
        order = (0, 2, 1, 3) if layout == "nhd" else (0, 1, 2, 3)
        k, v = (x.permute(order).contiguous().permute(order) for x in (kv.k, kv.v))
        kv = PagedKV(k, v, kv.block_table, kv.seq_lens)
        pages = ragged_lists(q, kv)
        rows = sequences.Rows(q, torch.empty_like(q), kv, pages)
        truth = attention.reference(q, kv, pages)[0]
        torch.testing.assert_close(varlen(rows.sequences).view_as(truth), truth, rtol=1e-4, atol=1e-5)


def test_requests_as_sequences():
    q, kv = make_case(RAGGED, Geometry(6, 2, 16))
    truth = attention.reference(q, kv, baselines.all_pages(kv))[0]
    torch.testing.assert_close(varlen(sequences.requests(q, q, kv)), truth, rtol=1e-4, atol=1e-5)


def test_rows_refuse_strides_that_no_page_number_can_say():
    q, kv = make_case([200], Geometry(4, 2, 16))
    S, H, D = 64, 2, 16
    storage = torch.zeros(8 * (S * H * 2 * D + 8), dtype=q.dtype)
    cache = storage.as_strided((8, H, S, 2 * D), (S * H * 2 * D + 8, 2 * D, H * 2 * D, 1))
    odd = PagedKV.from_fused(cache, kv.block_table, kv.seq_lens)
    with pytest.raises(
        UnsupportedError, match="kv.k: expected a page stride that is a multiple of the head stride, got 4104, 32"
    ):
        sequences.Rows(q, q, odd, ragged_lists(q, odd))
    split = PagedKV(kv.k, kv.v.contiguous(), kv.block_table, kv.seq_lens)
    with pytest.raises(UnsupportedError, match="differ in page stride"):
        sequences.Rows(q, q, split, ragged_lists(q, split))


def test_fa3_says_why_it_does_not_run():
    q, kv = make_case([200], Geometry(4, 2, 16))
    with pytest.raises(UnsupportedError, match="FA3 needs a Hopper GPU"):
        FA3Varlen(q.cpu(), kv, ragged_lists(q, kv))


def test_extended_lists_keep_what_was_listed_and_the_current_page_last():
    q, kv = make_case(RAGGED, Geometry(4, 2, 16))
    pages = ragged_lists(q, kv)
    longest = pages.lengths.amax()
    padded = page_sets.extended(pages, kv, longest.expand_as(pages.lengths))
    for before, after in zip(page_sets_of(pages), page_sets_of(padded), strict=True):
        assert before <= after
    num_pages = kv.num_pages()[:, None].expand_as(pages.lengths)
    assert torch.equal(padded.lengths, torch.minimum(num_pages, longest.expand_as(pages.lengths)))
    for b in range(kv.batch):
        for h in range(kv.num_kv_heads if kv.seq_lens[b] else 0):
            ids = padded.page_ids[b, h, : padded.lengths[b, h]].tolist()
            assert len(set(ids)) == len(ids)
            assert ids[-1] == kv.block_table[b, kv.num_pages()[b] - 1]
            assert padded.last_page_len[b, h] == kv.last_page_len()[b]
    assert page_sets.missed(padded, kv, pages) == 0
    assert page_sets.missed(pages, kv, padded) == int((padded.lengths - pages.lengths).sum())


@pytest.mark.parametrize("length", range(18))
def test_buckets_are_powers_of_two(length):
    assert bucket_of(length) == min(
        [0, 1, 2, 4, 8, 16, 32][i] for i in range(7) if [0, 1, 2, 4, 8, 16, 32][i] >= length
    )


@pytest.fixture
def without_fa3(monkeypatch):
    """Arms with a choice take this project's kernel."""

    def refuse(_):
        raise UnsupportedError("planted")

    monkeypatch.setattr(fa3, "require", refuse)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("arm_class", [Padding, Pow2Buckets, SharedList])
def test_arms_that_read_more_than_they_were_given(device, without_fa3, arm_class, layout):
    q, kv = make_case(RAGGED, Geometry(6, 2, 32), layout=layout, device=device)
    pages = ragged_lists(q, kv)
    clean = make_case(RAGGED, Geometry(6, 2, 32), layout=layout, device=device)[1]
    arm = arm_class(q, kv, pages)
    arm.plan()
    poison(kv, arm.attended())
    for seed in (0, 3):
        if seed:
            kv.k.copy_(clean.k)
            kv.v.copy_(clean.v)
            page_sets.overwrite(pages, ragged_lists(q, kv, seed))
            arm.plan()
        arm.run()
        check_against_float32(arm)
        assert page_sets.missed(arm.attended(), kv, pages) == 0
        lengths = arm.attended().lengths
        num_pages = kv.num_pages()[:, None]
        if arm_class is Padding:
            assert torch.equal(lengths, torch.minimum(num_pages, pages.lengths.amax()).expand_as(lengths))
        elif arm_class is Pow2Buckets:
            want = torch.tensor([bucket_of(n) for n in pages.lengths.flatten().tolist()], device=device).view_as(
                lengths
            )
            assert torch.equal(lengths, torch.minimum(num_pages, want).to(torch.int32))
            assert len(arm.calls) == len(set(want.flatten().tolist()) - {0})
        else:
            sets = page_sets_of(pages)
            unions = [sets[2 * b] | sets[2 * b + 1] for b in range(kv.batch) for _ in range(2)]
            assert page_sets_of(arm.attended()) == unions
        assert arm.moved_bytes() == int(arm.attended().num_tokens(64).sum()) * 2 * 32 * 2
    if arm_class is not SharedList:
        assert arm.implementation == "moira_kernels.attend (planted)"


def test_compressed_lists_against_a_loop(device):
    q, kv = make_case(RAGGED, Geometry(6, 2, 32), device=device)
    pages = ragged_lists(q, kv)
    rows = sequences.Rows(q, torch.empty_like(q), kv, pages)
    want, indptr = [], [0]
    for b in range(kv.batch):
        for h in range(2):
            want += [page * rows.factor + h for page in pages.page_ids[b, h, : pages.lengths[b, h]].tolist()]
            indptr.append(len(want))
    got_indptr, got = flashinfer_decode.compressed(rows.sequences.page_table, pages.lengths.flatten().cpu())
    assert (got_indptr.tolist(), got.tolist()) == (indptr, want)

    options = {"dtype": torch.int32, "device": device}
    buffers = [torch.full((size,), -7, **options) for size in (pages.num_rows + 1, pages.num_rows * kv.max_pages, 12)]
    flashinfer_fullwidth.compress(pages, kv.num_kv_heads, rows.factor, *buffers)
    assert buffers[0].tolist() == indptr
    assert buffers[1][: len(want)].tolist() == want
    assert (buffers[1][len(want) :] == -7).all()
    assert torch.equal(buffers[2], pages.last_page_len.flatten())


def test_compressed_lists_of_many_rows(device):
    """More rows than are added up at once, and lists longer than are copied at once."""
    lengths = torch.randint(0, 3, (1300, 1), dtype=torch.int32, device=device)
    lengths[1200] = 300
    ids = torch.randint(0, 99, (1300, 1, 300), dtype=torch.int32, device=device)
    pages = RaggedPages(ids, lengths, torch.ones_like(lengths))
    buffers = [torch.zeros(size, dtype=torch.int32, device=device) for size in (1301, 1300 * 300, 1300)]
    flashinfer_fullwidth.compress(pages, 1, 1, *buffers)
    indptr, indices = flashinfer_decode.compressed(ids[:, 0], lengths[:, 0].cpu())
    assert torch.equal(buffers[0].cpu(), indptr)
    assert torch.equal(buffers[1][: len(indices)], indices)


@pytest.fixture
def stand_in_fa3(monkeypatch):
    """FA3's place is taken by ``varlen``; its metadata is the lengths it was made for."""

    def attend(s, first_tokens, metadata):
        assert first_tokens.tolist() == list(range(len(s.q) + 1))
        assert torch.equal(metadata, s.seq_lens)
        s.out.copy_(varlen(s))

    monkeypatch.setattr(fa3, "require", lambda s: "stand-in")
    monkeypatch.setattr(fa3, "library", lambda: ("stand-in", lambda s, first_tokens: s.seq_lens.clone(), attend))


class StandInFlashInfer:
    """The wrapper's place: reads the buffers as its kernel does, and only what it was planned for."""

    def __init__(self, workspace, layout, use_tensor_cores, use_cuda_graph=False, **buffers):
        assert (layout, use_tensor_cores) == ("NHD", True)
        self.fixed = list(buffers.values()) if use_cuda_graph else None

    def plan(self, indptr, indices, last_page_len, num_q_heads, num_kv_heads, head_dim, page_size, **dtypes):
        assert indptr.device.type == last_page_len.device.type == "cpu"
        assert set(dtypes.values()) == {torch.bfloat16}
        self.sizes = num_q_heads, num_kv_heads, head_dim, page_size
        self.most = indptr.diff()
        if self.fixed is None:
            self.lists = indptr, indices, last_page_len
        else:
            for buffer, value in zip(self.fixed, (indptr, indices, last_page_len), strict=True):
                buffer[: len(value)].copy_(value)
            self.lists = self.fixed

    def run(self, q, cache, out):
        indptr, indices, last_page_len = self.lists
        k, v = cache
        assert self.sizes == (q.shape[1], k.shape[2], q.shape[2], k.shape[1])
        lengths = indptr.diff()
        assert (lengths <= self.most).all()
        table = torch.zeros((len(q), max(1, int(lengths.max()))), dtype=torch.int32)
        for n, length in enumerate(lengths.tolist()):
            table[n, :length] = indices[indptr[n] : indptr[n] + length]
        tokens = torch.where(lengths > 0, (lengths - 1) * k.shape[1] + last_page_len, 0)
        out.copy_(varlen(sequences.Sequences(q, out, k, v, table, tokens)))


@pytest.fixture
def stand_in_flashinfer(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = StandInFlashInfer
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer_decode, "name", lambda: "stand-in")


LIBRARY_ARMS = (
    "dense-fa3",
    "dense-flashinfer",
    "fa3-varlen",
    "fa3-varlen-rebuilt",
    "flashinfer-fullwidth",
    "flashinfer-plan",
    "padding",
    "pow2-buckets",
)


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("name", LIBRARY_ARMS)
def test_what_arms_hand_to_their_library(stand_in_fa3, stand_in_flashinfer, name, layout):
    """On CPU tensors, with the libraries' kernels replaced by loops over the same arguments."""
    if torch.cuda.is_available():
        pytest.skip("Triton kernels are compiled here: tests/test_baselines_gpu.py runs the real libraries")
    q, kv = make_case(RAGGED, Geometry(4, 2, 64), layout=layout)
    pages = ragged_lists(q, kv)
    arm = baselines.load(name)(q, kv, pages)
    for seed in (0, 1):
        if seed:
            page_sets.overwrite(pages, ragged_lists(q, kv, seed))
        parts = arm.plan()
        arm.run()
        check_against_float32(arm)
        assert arm.implementation.startswith("stand-in")
    assert bool(parts) == (not arm.graph_safe)
    assert (arm.attended() is pages) == (name.startswith(("fa3", "flashinfer")))
