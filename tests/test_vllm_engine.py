"""The plugin inside real vLLM engines on the real small model, with the PyTorch path of vLLM's CPU build.

Every decode step of every layer is checked: the lists must be those that the float32 reference makes from summaries
rebuilt from the cache alone, and unwritten summaries are NaN. Tokens are compared with dense vLLM's (its own CPU
backend) at gamma = 1, where the pipeline reads everything: below, dropped pages and what recomputation does to the
cache change tokens by design. In float32 they are equal; bf16 has ties.
"""

import pytest
import torch

from tests import engines

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU"),
]

import vllm  # noqa: E402

from moira_kernels import Coverage  # noqa: E402
from moira_kernels.pipeline import ReferenceLayer  # noqa: E402
from moira_kernels.vllm_plugin import require_sparse  # noqa: E402
from moira_kernels.vllm_plugin.cpu import CpuImpl, CpuMetadataBuilder  # noqa: E402

TIE = {"bfloat16": 0.375, "float32": 1e-3}
"""Gaps of the two best tokens up to this are ties. Logits of 16 to 32 have bf16 steps of 0.125."""
LONG = 1600
TOKENS = {LONG: 24, 1: 24, 63: 9, 64: 24, 65: 30, 128: 18, 300: 48, 450: 48, 700: 48}
"""Prompts by their length, and how many tokens each decodes: some end early, so that steps are mixed."""


class CheckedLayer(ReferenceLayer):
    """The layer, and after each step the lists that nothing but the cache gives."""

    steps = 0

    def sibling(self, kv, lengths=None):
        layer = super().sibling(kv, lengths)
        for tensor in (layer.summaries.mean, layer.summaries.variance):
            tensor.fill_(float("nan"))
        return layer

    def run(self, q, kv, *, gamma=None, softmax_scale=None, **options):
        out = super().run(q, kv, gamma=gamma, softmax_scale=softmax_scale, **options)
        selector = Coverage(gamma=gamma)
        selector.allocate(kv)
        full = (kv.seq_lens // kv.page_size).tolist()
        selector.update(kv, torch.cat([table[:n] for table, n in zip(kv.block_table, full, strict=True)]).long())
        want = selector.select(q, kv, softmax_scale)
        assert torch.equal(self.pages.lengths[: kv.batch], want.lengths)
        for b, h in ((b, h) for b in range(kv.batch) for h in range(kv.num_kv_heads)):
            n = int(want.lengths[b, h])
            assert torch.equal(self.pages.page_ids[b, h, :n], want.page_ids[b, h, :n])
        CheckedLayer.steps += 1
        return out


class RecordingBuilder(CpuMetadataBuilder):
    """The builder, with checked layers; remembers (decode rows, prefill rows) of every step."""

    layer_class = CheckedLayer
    batches = []  # noqa: RUF012

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.group is not None:
            rows = common_attn_metadata.num_reqs
            RecordingBuilder.batches.append((metadata.decode_rows, rows - metadata.decode_rows))
        return metadata


@pytest.fixture(scope="module", autouse=True)
def recording():
    from moira_kernels.vllm_plugin.cpu import CpuBackend

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuBackend, "get_builder_cls", staticmethod(lambda: RecordingBuilder))
        yield


@pytest.fixture(scope="module")
def folder():
    return engines.smollm2_folder()


@pytest.fixture(scope="module")
def prompts(folder):
    """Token ids of plain text, by length; each starts elsewhere, so that no two share a page. "next" is how the longest
    goes on.
    """
    from pathlib import Path

    from transformers import AutoTokenizer

    root = Path(__file__).parent.parent
    text = "".join((root / name).read_text() for name in ("README.md", "LICENSE", "docs/page_lists.md"))
    ids = AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    return {n: ids[37 * i : 37 * i + n] for i, n in enumerate(TOKENS)} | {"next": ids[LONG : LONG + 25]}


def forced(llm, prompt, tokens):
    """Log-probabilities [len(tokens), vocabulary] of the steps in which ``tokens`` are decoded whatever is likely."""
    model = engines.runner(llm).model
    original, seen = model.compute_logits, []

    def compute_logits(hidden):
        logits = original(hidden)
        seen.append(logits[0].float().log_softmax(-1))
        logits = logits.clone()
        logits[0, tokens[len(seen) - 1]] = 1e4
        return logits

    model.compute_logits = compute_logits
    try:
        ((got, _),) = engines.greedy(llm, [prompt], len(tokens))
    finally:
        model.compute_logits = original
    assert got == tokens
    return torch.stack(seen)


@pytest.fixture(scope="class")
def dense(request, folder, prompts):
    """Dense vLLM: greedy tokens of the class's prompts, each alone, and the log-probabilities of the longest's text."""
    llm = engines.start(folder, dtype=request.cls.DTYPE)
    try:
        assert {type(layer.impl).__name__ for layer in engines.layers(llm).values()} == {"CPUAttentionBackendImpl"}
        tokens = {n: engines.greedy(llm, [prompts[n]], TOKENS[n])[0] for n in request.cls.PROMPTS}
        logprobs = forced(llm, prompts[LONG], prompts["next"]) if LONG in tokens else None
        return {"tokens": tokens, "logprobs": logprobs}
    finally:
        engines.stop(llm)


def set_gamma(llm, gamma):
    (builder,) = engines.builders(llm)
    for rule in builder.group.rule.values():
        rule["gamma"] = gamma


def compare(got, want, label, report, dtype="float32"):
    """Equal tokens, or a first divergence at a tie, which is reported."""
    assert len(got[0]) == len(want[0])
    at = engines.first_divergence(got[0], want[0])
    if at is not None:
        gap = max(got[1][at], want[1][at])
        report(f"{label}: first divergence at token {at} of {len(want[0])}, gap of the two best {gap:.3f}")
        assert gap <= TIE[dtype], label


@pytest.fixture
def report(capsys):
    def write(line):
        with capsys.disabled():
            print(f"\n  {line}", end="", flush=True)

    return write


@pytest.fixture(scope="class")
def llm(request, folder, dense):
    """The engine of a test class."""
    RecordingBuilder.batches.clear()
    options = {"dtype": request.cls.DTYPE, **request.cls.OPTIONS}
    llm = engines.start(folder, {"gamma": 1.0} | options.pop("moira", {}), **options)
    assert {type(layer.impl) for layer in engines.layers(llm).values()} == {CpuImpl}
    yield llm
    engines.stop(llm)


class TestWholePrompts:
    """Prompts in one chunk each, no prefix cache, four requests at a time."""

    DTYPE, PROMPTS, OPTIONS = "bfloat16", tuple(TOKENS), {}

    def test_gamma_one_gives_dense_tokens(self, llm, prompts, dense, report):
        """More requests than fit at once; one-token prompts; prompts that end before, at and behind a page's end."""
        before = CheckedLayer.steps
        got = engines.greedy(llm, [prompts[n] for n in TOKENS], TOKENS.values())
        for (n, want), tokens in zip(dense["tokens"].items(), got, strict=True):
            compare(tokens, want, f"prompt of {n} tokens", report, "bfloat16")
        assert CheckedLayer.steps > before
        assert any(decode and prefill for decode, prefill in RecordingBuilder.batches), "no mixed step"
        require_sparse(llm)

    def test_token_kl_and_page_reads(self, llm, prompts, dense, report):
        """Forced along the text; the first token comes from the prompt, which is dense in both."""
        truth = dense["logprobs"][1:]
        rows = []
        for gamma in (0.9, 0.95, 0.98, 0.99, 1.0):
            set_gamma(llm, gamma)
            before = require_sparse(llm)[0]
            logprobs = forced(llm, prompts[LONG], prompts["next"])[1:]
            after = require_sparse(llm)[0]
            read, total = (sum(after[n][key] - before[n][key] for n in after) for key in ("pages_read", "pages_total"))
            kl = (truth.exp() * (truth - logprobs)).sum(-1)
            rows.append((gamma, kl.mean().item(), read / total))
            report(f"gamma {gamma}: token KL {kl.mean():.2e} (largest {kl.max():.2e}), pages read {read / total:.1%}")
        divergences, fractions = [kl for _, kl, _ in rows], [read for _, _, read in rows]
        assert fractions == sorted(fractions)
        assert fractions[0] < 0.9
        assert fractions[-1] == 1
        assert divergences[-1] < 2e-3
        assert divergences[-1] < divergences[2] < divergences[0]

    def test_abort_and_page_reuse_g3(self, llm, prompts):
        """Requests that end early leave their pages to others; every later list is still the reference's."""
        set_gamma(llm, 0.9)
        engine = llm.llm_engine
        sampling = vllm.SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        for i, n in enumerate((700, 450, 300, 128)):
            engine.add_request(f"abort-{i}", {"prompt_token_ids": list(prompts[n])}, sampling)
        for _ in range(6):
            engine.step()
        engine.abort_request(["abort-0", "abort-2"], internal=False)
        engine.add_request("late", {"prompt_token_ids": list(prompts[LONG])}, sampling)
        before = CheckedLayer.steps
        done = []
        while engine.has_unfinished_requests():
            done += [output.request_id for output in engine.step() if output.finished]
        assert sorted(done) == ["abort-1", "abort-3", "late"]
        assert CheckedLayer.steps - before >= 30 * 29
        require_sparse(llm)

    def test_fixed_counts(self, llm, prompts, monkeypatch):
        """The fixed-count rule instead: exactly that many pages are read."""
        (builder,) = engines.builders(llm)
        counts = torch.tensor([4, 6, 8], dtype=torch.int32)
        monkeypatch.setattr(CheckedLayer, "run", ReferenceLayer.run)  # the check knows the coverage rule only
        rule = dict(builder.group.rule)
        builder.group.rule.update({name: {"counts": counts} for name in rule})
        before = builder.group.counters.read()
        engines.greedy(llm, [prompts[LONG]], 6)
        after = builder.group.counters.read()
        builder.group.rule.update(rule)
        assert {after[n]["pages_read"] - before[n]["pages_read"] for n in after} == {5 * int(counts.sum())}


class TestChunksCachePreemption:
    """Chunks of 100 tokens at most, prefix caching, and too few pages for all requests; layer 0 dense."""

    DTYPE, PROMPTS = "float32", (700, 450, 300, 1, 128, 65)
    OPTIONS = {  # noqa: RUF012
        "moira": {"dense_layers": [0]},
        "max_model_len": 1024,
        "max_num_batched_tokens": 100,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": 26,
    }

    def test_chunks_that_end_inside_pages(self, llm, prompts, dense, report):
        wanted = (700, 300, 1, 128, 65)
        got = engines.greedy(llm, [prompts[n] for n in wanted], [TOKENS[n] for n in wanted])
        for n, tokens in zip(wanted, got, strict=True):
            compare(tokens, dense["tokens"][n], f"prompt of {n} tokens in chunks", report)
        mixed = [(decode, prefill) for decode, prefill in RecordingBuilder.batches if decode and prefill]
        assert len(mixed) > 5
        counts = require_sparse(llm)[0]
        reasons = [layer["dense_because"] for layer in counts.values()]
        assert reasons == ["dense_layers"] + [None] * 29
        first = next(iter(counts.values()))
        assert first["sparse_rows"] == 0
        assert first["dense_rows"] > 0

    def test_prefix_hits(self, llm, prompts, dense, report):
        """The same prompt again reads pages, and summaries, that the first request wrote."""
        for gamma in (1.0, 0.9):
            set_gamma(llm, gamma)
            llm.reset_prefix_cache()
            sampling = vllm.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
            prompt = {"prompt_token_ids": list(prompts[700])}
            cold, warm = (llm.generate([prompt], sampling, use_tqdm=False)[0] for _ in range(2))
            assert cold.num_cached_tokens == 0
            assert warm.num_cached_tokens == 640
            if gamma == 1:
                (got,) = engines.greedy(llm, [prompts[700]], TOKENS[700])
                compare(got, dense["tokens"][700], "prompt of 700 tokens, 640 cached", report)

    def test_preemption_and_recompute_g2(self, llm, prompts, dense, report):
        """The prompts take 24 of 25 pages, so the last request is preempted while it decodes."""
        preempted = []
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        original = scheduler._preempt_request
        scheduler._preempt_request = lambda request, *a, **k: (preempted.append(request), original(request, *a, **k))[1]
        try:
            for gamma in (1.0, 0.9):
                set_gamma(llm, gamma)
                llm.reset_prefix_cache()
                preempted.clear()
                tokens = 48 if gamma == 1 else 40
                got = engines.greedy(llm, [prompts[n] for n in (700, 450, 300)], tokens)
                assert preempted, "nothing was preempted"
                for n, each in zip((700, 450, 300), got, strict=True):
                    if gamma == 1:
                        compare(each, dense["tokens"][n], f"prompt of {n} tokens, preempted", report)
        finally:
            scheduler._preempt_request = original
        require_sparse(llm)


def test_speculative_decoding_is_refused_at_start(folder):
    from moira_kernels import UnsupportedError

    with pytest.raises(UnsupportedError, match="cannot serve speculative decoding"):
        engines.start(
            folder, {}, speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
        )


def test_windowed_layers_stay_dense_and_global_ones_sparse_f1(tmp_path):
    """A model that alternates: chosen for every layer, or by kind for the global ones only."""
    sizes = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "rope_local_base_freq": 1e4,
    }
    model = engines.write_config(tmp_path / "gemma", **sizes)
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "num_gpu_blocks_override": 80}
    prompt = [(7 * i) % 500 + 3 for i in range(400)]
    outs = []
    for moira, choice in (
        (None, {}),
        ({"gamma": 1.0}, {}),
        ({"gamma": 1.0}, {"attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}}}),
    ):
        llm = engines.start(model, moira, **options, **choice)
        try:
            outs.append(engines.greedy(llm, [prompt], 12)[0])
            if moira:
                counts = require_sparse(llm)[0]
                sparse = [name for name, layer in counts.items() if layer["dense_because"] is None]
                assert [name.split(".")[2] for name in sparse] == ["1", "3"]
            if choice:
                assert {type(layer.impl).__name__ for layer in engines.layers(llm).values()} == {
                    "CpuImpl",
                    "CPUAttentionBackendImpl",
                }
        finally:
            engines.stop(llm)
    for got in outs[1:]:
        compare(got, outs[0], "windowed and global layers", print, "bfloat16")
