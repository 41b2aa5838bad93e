"""The plugin's parts that need no vLLM: settings, rows and pages of a step, counters, shared buffers."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moira_kernels import UnsupportedError
from moira_kernels.pipeline import DecodeLayer, ReferenceLayer
from moira_kernels.testing import Geometry, make_case
from moira_kernels.vllm_plugin import steps
from moira_kernels.vllm_plugin.config import ENVIRONMENT, MoiraConfig
from moira_kernels.vllm_plugin.steps import Counters, Group, filled_pages, leading_decode_rows


def engine(additional=None):
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(num_hidden_layers=3), get_total_num_kv_heads=lambda: 2, max_model_len=640
    )
    return SimpleNamespace(additional_config=additional or {}, model_config=model)


def test_config_from_either_place(monkeypatch, tmp_path):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    assert MoiraConfig.from_vllm(engine()) == MoiraConfig(gamma=0.98)
    assert MoiraConfig.from_vllm(engine({"moira": {"gamma": 0.9, "dense_layers": [0, 2]}})).dense_layers == (0, 2)
    monkeypatch.setenv(ENVIRONMENT, '{"policy": "profiled-count", "counts": [[2, 3], [4, 5], [6, 7]]}')
    assert MoiraConfig.from_vllm(engine()).counts[2] == (6, 7)
    with pytest.raises(ValueError, match="not both"):
        MoiraConfig.from_vllm(engine({"moira": {}}))
    file = tmp_path / "moira.json"
    file.write_text(json.dumps({"partition": "eq4"}))
    monkeypatch.setenv(ENVIRONMENT, str(file))
    assert MoiraConfig.from_vllm(engine()).partition == "eq4"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gama": 0.9}, "unknown setting gama; expected gamma, policy"),
        ({"gamma": 0}, r"gamma: expected a number in \(0, 1\], got 0"),
        ({"gamma": "0.9"}, "gamma: expected a number"),
        ({"gamma": True}, "gamma: expected a number"),
        ({"policy": "top-k"}, "policy: expected one of coverage, fixed-count, profiled-count"),
        ({"partition": "flat"}, "partition: expected one of balanced, eq4"),
        ({"policy": "fixed-count"}, "policy 'fixed-count' needs 'count'"),
        ({"count": 4}, "policy 'coverage' has no 'count'"),
        ({"policy": "fixed-count", "count": 0}, "count: expected at least 1 page"),
        ({"policy": "profiled-count", "counts": [[1, 2], [3]] * 2}, "counts: expected 3 layers of 2 KV heads"),
        ({"policy": "profiled-count", "counts": [[0]]}, "counts: expected pages, at least 1"),
        ({"dense_layers": [3]}, "the model has layers 0 to 2"),
        ({"dense_layers": "0"}, "dense_layers: expected layer indices"),
        (["gamma"], "expected a JSON object"),
    ],
)
def test_wrong_settings_say_what_was_expected(monkeypatch, settings, message):
    monkeypatch.delenv(ENVIRONMENT, raising=False)
    with pytest.raises(ValueError, match=message):
        MoiraConfig.from_vllm(engine({"moira": settings}))


@pytest.mark.parametrize("text", ["{", "/nowhere/moira.json", "0.9"])
def test_unreadable_environment(monkeypatch, text):
    monkeypatch.setenv(ENVIRONMENT, text)
    with pytest.raises(ValueError, match=f"{ENVIRONMENT}: expected a JSON object"):
        MoiraConfig.from_vllm(engine())


@pytest.mark.parametrize(
    ("query_lens", "rows"),
    [
        ([1, 1, 1], 3),
        ([1, 1, 0, 0], 4),  # padding of a captured step
        ([1, 1, 5, 7], 2),
        ([5, 7], 0),
        ([1, 9, 1], 1),  # a one-token prompt that vLLM sorts last
        ([1], 1),
    ],
)
def test_leading_decode_rows_h1(query_lens, rows):
    assert leading_decode_rows(np.array(query_lens)) == rows


@pytest.mark.parametrize("chunks", [(100, 100), (40,) * 5, (63, 1, 136), (64, 64, 72), (200,), (1, 199), (128, 72)])
def test_filled_pages_are_those_whose_last_slot_is_written_g5(chunks):
    """Beside a decode row in front and another prompt behind; over all chunks every full page comes once."""
    done, seen = 0, []
    for chunk in chunks:
        done += chunk
        index = filled_pages(np.array([1, chunk, 70]), np.array([64, done, 70]), first_row=1)
        want = [(1, page) for page in range(4) if done - chunk < 64 * (page + 1) <= done] + [(2, 0)]
        assert list(zip(*index.tolist(), strict=True)) == want
        seen += [page for row, page in want if row == 1]
    assert seen == [0, 1, 2]


def test_count_kernel_is_the_reference(device):
    """Sparse, dense, made-up and padding rows; lists are marked as counted; a second step adds."""
    B, H = 150, 3
    seq_lens = torch.randint(1, 1000, (B,), dtype=torch.int32)
    seq_lens[5] = 0
    slots = torch.randint(0, 10**6, (B,))
    slots[[5, 7, 140]] = -1
    lengths = torch.randint(1, 9, (2, 200, H), dtype=torch.int32)
    lengths[0, 10:20] = -1
    lengths[:, B:] = -1
    lengths[1] = -1  # a dense layer
    got, want = (torch.zeros(2, 4, dtype=torch.int64, device=device) for _ in range(2))
    for _ in range(2):
        a, b = (lengths.clone().to(device) for _ in range(2))
        steps.count(a, seq_lens.to(device), slots.to(device), got)
        steps.count_reference(b, seq_lens.to(device), slots.to(device), want)
        assert torch.equal(a, b)
        assert (a == -1).all()
    assert torch.equal(got, want)
    pages = (seq_lens + 63) // 64
    real = slots >= 0
    listed = real.clone()
    listed[10:20] = False
    total = int(pages[real].sum()) * H
    read = int(lengths[0, :B][listed].sum()) + int(pages[10:20].sum()) * H
    assert want.tolist() == [[2 * v for v in row] for row in ([137, 10, read, total], [0, 147, total, total])]


def allocate(monkeypatch, free=2**40, config=None, layer_class=ReferenceLayer, dense=(), **counts):
    monkeypatch.setattr(steps.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    q, kv = make_case([900, 64, 130], Geometry(6, 2, 32))
    cache = kv.k.as_strided((*kv.k.shape[:3], 64), kv.k.stride())
    names = ["model.layers.0.attn", "model.layers.1.attn", "model.layers.2.attn"]
    why = {name: "dense_layers" if i in dense else None for i, name in enumerate(names)}
    caches = dict.fromkeys(names, cache)
    return (
        Group.allocate(caches, why, 6, kv.block_table, 8, config or MoiraConfig(), counts, layer_class),
        q,
        kv,
        cache,
    )


def test_memory_is_printed_and_checked_i7(monkeypatch, caplog):
    with caplog.at_level("INFO", logger="vllm.moira"):
        group, _, kv, _ = allocate(monkeypatch)
    assert "3 layers x 20 pages" in caplog.text
    shared = next(iter(group.layers.values()))
    summaries = 3 * 4 * kv.k.shape[0] * 2 * 32
    assert sum(layer.summaries.mean.nbytes * 2 for layer in group.layers.values()) == summaries
    assert shared.log_mass.shape == (8, 6, 15)
    with pytest.raises(UnsupportedError, match="Lower gpu_memory_utilization, max_num_seqs or max_model_len"):
        allocate(monkeypatch, free=summaries)


def test_layers_share_all_but_summaries_and_lengths(monkeypatch):
    group, *_ = allocate(monkeypatch, dense=(1,))
    a, b = group.layers.values()
    assert a.log_mass.data_ptr() == b.log_mass.data_ptr()
    assert a.pages.page_ids.data_ptr() == b.pages.page_ids.data_ptr()
    assert a.summaries.mean.data_ptr() != b.summaries.mean.data_ptr()
    assert [layer.pages.lengths.data_ptr() for layer in (a, b)] == [
        group.counters.lengths[i].data_ptr() for i in (0, 2)
    ]


@pytest.mark.parametrize("rule", ["coverage", "fixed-count"])
def test_kernels_and_reference_agree_through_a_group(monkeypatch, rule):
    """The same step through the kernels (interpreted) and the references: lists equal, outputs close, counts equal."""
    config = MoiraConfig(gamma=0.8)
    counts = {}
    if rule == "fixed-count":
        config = MoiraConfig(policy=rule, count=4)
        counts = {f"model.layers.{i}.attn": [4, 3] for i in range(3)}
    outs, lengths, read = [], [], []
    for layer_class in (DecodeLayer, ReferenceLayer):
        group, q, kv, cache = allocate(monkeypatch, config=config, layer_class=layer_class, **counts)
        full = torch.cat([t[: n // 64] for t, n in zip(kv.block_table, kv.seq_lens.tolist(), strict=True)])
        out = torch.full_like(q, float("nan"))
        for name in group.layers:
            group.prefill(name, cache, kv.block_table, kv.seq_lens, full)
            group.decode(name, 3 * q, cache, kv.block_table, kv.seq_lens, 0.2, out)
        lengths.append(group.counters.lengths[:, :3].clone())
        group.counters.count(kv.seq_lens, torch.tensor([5, 6, -1]))
        outs.append(out)
        read.append(group.counters.read())
    assert torch.equal(*lengths)
    assert lengths[0][0, 0].min() < 15
    assert torch.allclose(outs[0].float(), outs[1].float(), atol=2e-2)
    assert read[0] == read[1]
    for counts_of_layer in read[0].values():
        assert (counts_of_layer["sparse_rows"], counts_of_layer["dense_rows"]) == (2, 0)
        assert counts_of_layer["pages_total"] == 2 * (15 + 1)


def test_counters_name_dense_layers():
    counters = Counters({"a": None, "b": "soft cap"}, 4, 2, torch.device("cpu"))
    counters.lengths[0, :2] = 3
    counters.count(torch.tensor([640, 640], dtype=torch.int32), torch.tensor([1, 2]))
    assert counters.read() == {
        "a": {"sparse_rows": 2, "dense_rows": 0, "pages_read": 12, "pages_total": 40, "dense_because": None},
        "b": {"sparse_rows": 0, "dense_rows": 2, "pages_read": 40, "pages_total": 40, "dense_because": "soft cap"},
    }


def test_other_page_sizes_are_refused_e3():
    cache = torch.zeros(4, 2, 32, 64, dtype=torch.bfloat16)
    table = torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(UnsupportedError, match="pages of 32 tokens, expected 64"):
        Group.allocate({"m.0": cache}, {"m.0": None}, 4, table, 2, MoiraConfig(), {}, ReferenceLayer)
