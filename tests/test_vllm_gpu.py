"""The plugin inside vLLM on a GPU: CUDA graphs, FlashAttention's prefill rows, lists, counters, nothing hidden.

Two models: a four-layer Llama with Llama-3.1-8B's heads and random weights; and the real small model, if its weights
are there or can be fetched.
"""

import os
import subprocess
import sys

import pytest
import torch

from tests import engines

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

from moira_cli.errors import CliError  # noqa: E402
from moira_kernels import Coverage  # noqa: E402
from moira_kernels.pipeline import DecodeLayer  # noqa: E402
from moira_kernels.testing import bf16_ulp  # noqa: E402
from moira_kernels.vllm_plugin import backend, require_sparse  # noqa: E402
from moira_kernels.vllm_plugin.steps import Counters  # noqa: E402

HEADS = {
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
}
TIE = {"random": 0.05, "smollm2": 0.375}
PROMPTS = (3000, 700, 64, 130, 66, 1500, 300, 2)
EAGER = {"enforce_eager": True}
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4]}}


@pytest.fixture(scope="module", params=["random", "smollm2"])
def model(request, tmp_path_factory):
    """(name, engine options)."""
    if request.param == "random":
        folder = engines.write_model(tmp_path_factory.mktemp("model"), **HEADS)
        return request.param, {"model": folder, "skip_tokenizer_init": True}
    try:
        return request.param, {"model": engines.smollm2_folder()}
    except CliError as error:
        pytest.skip(str(error))


def prompts(lengths=PROMPTS):
    """Token ids that no two prompts share a page of."""
    return [[(7919 * (i + 1) + 31 * t * (i + 3)) % 499 + 3 for t in range(n)] for i, n in enumerate(lengths)]


@pytest.fixture
def start(model):
    """Start an engine; the one before ends first."""
    running = []

    def start(moira, **options):
        while running:
            engines.stop(running.pop())
        defaults = {"max_model_len": 8192, "gpu_memory_utilization": 0.5, "max_num_seqs": 4, **model[1]}
        llm = engines.start(moira=moira, **(defaults | options))
        kinds = {type(layer.impl).__name__ for layer in engines.layers(llm).values()}
        assert kinds == {"FlashAttentionImpl" if moira is None else "MoiraImpl"}
        running.append(llm)
        return llm

    yield start
    while running:
        engines.stop(running.pop())


def counted(llm, *arguments):
    """(``engines.greedy`` of the arguments, what the counters of each layer gained meanwhile)."""
    (before,) = llm.collective_rpc("moira_counters")  # vLLM may have warmed up with decode steps
    out = engines.greedy(llm, *arguments)
    (after,) = require_sparse(llm)
    nothing = dict.fromkeys(Counters.FIELDS, 0)
    return out, {n: {f: layer[f] - before.get(n, nothing)[f] for f in nothing} for n, layer in after.items()}


def test_memory_is_taken_once(start):
    """The first step, before capture, takes the buffers for the real cache; generating takes none."""
    llm = start({"gamma": 0.9}, **GRAPHS)
    (builder,) = engines.builders(llm)
    pages = next(iter(engines.layers(llm).values())).kv_cache.shape[0]
    assert {layer.summaries.mean.shape[0] for layer in builder.group.layers.values()} == {pages}
    before = builder.group
    engines.greedy(llm, prompts(), 4)
    assert builder.group is before


@pytest.mark.parametrize("runner", ["1", "0"], ids=["v2", "v1"])
def test_graph_replay_is_eager_bit_for_bit(start, monkeypatch, runner):
    """Four requests decode over page borders; tokens and log-probabilities are equal to the last bit."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    replays = []
    original = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda self: (replays.append(1), original(self))[1])
    outs = []
    for options in (EAGER, GRAPHS):
        llm = start({"gamma": 0.9}, **options)
        replays.clear()
        out, counts = counted(llm, prompts((3000, 700, 64, 130)), 80)
        outs.append(out)
        read, total = (sum(layer[key] for layer in counts.values()) for key in ("pages_read", "pages_total"))
        assert read < 0.95 * total
        assert bool(len(replays) >= 70) is (options is GRAPHS)
    assert outs[0] == outs[1]


def record_prefill_rows(patch, cls):
    """Outputs of the prefill rows of every mixed step, by call of ``cls.forward``."""
    seen = []
    original = cls.forward

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *rest, **named):
        out = original(self, layer, query, key, value, kv_cache, attn_metadata, output, *rest, **named)
        if attn_metadata is not None and attn_metadata.max_query_len > 1:
            start = attn_metadata.query_start_loc
            first = next(i for i, n in enumerate(start.diff().tolist()) if n != 1)
            if first:
                seen.append(output[first : attn_metadata.num_actual_tokens].cpu())
        return out

    patch.setattr(cls, "forward", forward)
    return seen


def test_prefill_rows_of_mixed_steps_are_dense_vllms(start):
    """Bit for bit, in every layer of every mixed step, prompts cut into chunks of up to 500 tokens."""
    rows = []
    for moira in (None, {"gamma": 0.9}):
        with pytest.MonkeyPatch.context() as patch:
            llm = start(moira, max_num_batched_tokens=500, **EAGER)
            rows.append(record_prefill_rows(patch, type(next(iter(engines.layers(llm).values())).impl)))
            engines.greedy(llm, prompts(), [30, 9, 40, 20, 30, 12, 25, 30])
    dense, moira = rows
    assert len(dense) == len(moira) > 20
    for a, b in zip(dense, moira, strict=True):
        assert torch.equal(a, b)


class CheckedLayer(DecodeLayer):
    """The layer; counts rows whose list is not the reference's, and checks summaries against the cache."""

    rows, wrong = 0, 0

    def sibling(self, kv, lengths=None):
        layer = super().sibling(kv, lengths)
        for tensor in (layer.summaries.mean, layer.summaries.variance):
            tensor.fill_(float("nan"))
        return layer

    def run(self, q, kv, *, gamma=None, softmax_scale=None, out=None):
        result = super().run(q, kv, gamma=gamma, softmax_scale=softmax_scale, out=out)
        full = (kv.seq_lens // kv.page_size).tolist()
        if not any(full):
            return result
        pages = torch.cat([table[:n] for table, n in zip(kv.block_table, full, strict=True)]).long()
        selector = Coverage(gamma=gamma)
        selector.allocate(kv)
        selector.update(kv, pages)
        for name in ("mean", "variance"):
            got, want = (getattr(s, name)[pages].float() for s in (self.summaries, selector.summaries))
            # What rounds in bf16 may come out a neighbour; a little more where a variance is tiny.
            assert ((got - want).abs() <= bf16_ulp(want) + 1e-6).all(), name
        selector.summaries = self.summaries
        want = selector.select(q, kv, softmax_scale)
        same = self.pages.lengths[: kv.batch] == want.lengths
        CheckedLayer.rows += same.numel()
        CheckedLayer.wrong += int((~same).sum())
        assert ((self.pages.lengths[: kv.batch] - want.lengths).abs() <= 1).all()
        return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 100},
        {"enable_prefix_caching": True},
        {"num_gpu_blocks_override": 70, "max_model_len": 4096},  # too few for all: preemption
    ],
    ids=["plain", "chunks", "prefix-cache", "preemption"],
)
def test_lists_are_the_references(start, monkeypatch, options):
    """At every decode step of every layer. A page whose share is a rounding from the threshold may differ."""
    monkeypatch.setattr(backend.MoiraMetadataBuilder, "layer_class", CheckedLayer)
    CheckedLayer.rows = CheckedLayer.wrong = 0
    llm = start({"gamma": 0.9}, **EAGER, **options)
    for _ in range(2):  # the second time, prefix caching hits
        engines.greedy(llm, prompts(), [70, 9, 70, 20, 70, 12, 70, 30])
    require_sparse(llm)
    assert CheckedLayer.rows > 2000
    assert CheckedLayer.wrong <= 1e-3 * CheckedLayer.rows, (CheckedLayer.wrong, CheckedLayer.rows)


def test_gamma_one_gives_dense_tokens_in_graphs(start, model, capsys):
    """vLLM's default compilation and graphs, more requests than the largest graph; no compilation after the start."""
    options = {
        "max_num_seqs": 8,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]},
        "jit_monitor_mode": "error",
    }
    tokens = [70, 9, 70, 20, 70, 12, 70, 30]
    want = engines.greedy(start(None, **options), prompts(), tokens)
    llm = start({"gamma": 1.0}, **options)
    got, counts = counted(llm, prompts(), tokens)
    for n, a, b in zip(PROMPTS, got, want, strict=True):
        at = engines.first_divergence(a[0], b[0])
        if at is not None:
            gap = max(a[1][at], b[1][at])
            with capsys.disabled():
                print(f"\n  prompt of {n} tokens: first divergence at token {at}, gap of the two best {gap:.4f}")
            assert gap <= TIE[model[0]]
    for layer in counts.values():
        assert layer["sparse_rows"] == sum(n - 1 for n in tokens)
        assert layer["dense_rows"] == 0
        assert layer["pages_read"] == layer["pages_total"]


def test_nothing_synchronises_behind_the_back():
    """vLLM's own check, which must be set before it is imported: a hidden synchronisation in a step is an error."""
    test = f"{__file__}::test_gamma_one_gives_dense_tokens_in_graphs"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "random", test],
        env=os.environ | {"VLLM_GPU_SYNC_CHECK": "error"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("partition", ["balanced", "eq4"])
def test_partitions_and_fixed_counts_in_graphs(start, partition):
    """The same lists, so the same pages read; a fixed count reads exactly that many."""
    llm = start({"policy": "fixed-count", "count": 5, "partition": partition}, **GRAPHS)
    _, counts = counted(llm, prompts((3000, 1500, 700)), 20)
    heads = engines.builders(llm)[0].num_heads_kv
    for layer in counts.values():
        assert layer["pages_read"] == 3 * 19 * heads * 5
