"""Traces: exports of the real schema, good and bad, and which stage a kernel belongs to."""

import gzip
import json

import pytest

from moira_cli import traces
from moira_cli.errors import ProfilerError
from moira_cli.stages import STAGES, classify
from tests.nsys_export import layer_kernels, write

STEPS = 20


def summary_of(path, kernels, **export):
    write(path, kernels, **export)
    records, _ = traces.read_nsys(path)
    return traces.summarize(records, STEPS, 1, [100.0], 90.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "report.sqlite"


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("_attend_balanced_kernel", "Attend"),
        ("_attend_eq4_kernel", "Attend"),
        ("_estimate_kernel", "Estimate"),
        ("_select_kernel", "Select"),
        ("_merge_eq4_kernel", "Merge"),
        ("_merge_balanced_kernel", "Merge"),
        ("_update_kernel", "Update"),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloop"
            "FwdSm90<(int)2, cute::tuple<cute::C<(int)1>>>>>>(T1::Params)",
            "FA3",
        ),
        ("void flash::prepare_varlen_num_blocks_kernel<(int)1, (bool)1>(int, int)", "FA3"),
        ("void flash::FlashAttnFwdCombine<cute::tuple<cute::C<(int)8>>>(T1)", "FA3"),
        (
            "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(flashinfer::M)1>>()",
            "FlashInfer",
        ),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<(unsigned int)8>(T2 *)", "FlashInfer"),
        ("kernel_mha", "FlashInfer"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<(int)128>>()", "SDPA"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "GEMM"),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_64x64_32x6_tn_align8>(T1::Params)",
            "GEMM",
        ),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int>>>(T1)", "GEMM"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<(int)32, (int)16, int>()", "GEMM"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>()", "GEMM"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>(const T1 *)", "rest"),
        ("void at::native::vectorized_elementwise_kernel<(int)4, at::native::FillFunctor<int>>(int, T2, T3)", "rest"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "rest"),
        ("void at::native::reduce_kernel<(int)512, (int)1>(T3)", "rest"),
        ("aten::scaled_dot_product_attention", "SDPA"),
        ("aten::index", "rest"),
        ("[memset]", "rest"),
        ("a_kernel_nobody_knows", "unclassified"),
        ("my_attend_kernel_of_another_project", "unclassified"),
    ],
)
def test_stage_of_a_kernel(name, stage):
    assert classify(name) == stage
    assert stage in STAGES


def test_stages_of_a_step(path):
    summary = summary_of(
        path,
        layer_kernels(STEPS),
        memsets=[(1_000_000 + 100_000 * i - 3000, 1_000_000 + 100_000 * i - 1000) for i in range(STEPS)],
    )
    assert {name: us for name, us in summary["stages"].items() if us} == {
        "Attend": 60, "Estimate": 10, "Select": 5, "Merge": 3, "rest": 2
    }  # fmt: skip
    assert summary["busy_us"] == 80
    assert summary["gaps_us"] == 20
    assert summary["overhead_pct"] == pytest.approx(100 / 9)
    assert summary["uneven"] == {}
    assert summary["notes"] == []
    assert [kernel["name"] for kernel in summary["kernels"]][0::4] == ["_attend_balanced_kernel", "[memset]"]
    assert {kernel["calls"] for kernel in summary["kernels"]} == {1}
    assert sum(kernel["share_pct"] for kernel in summary["kernels"]) == pytest.approx(100)
    assert [k["stage"] for k in summary["timeline"]] == ["rest", "Estimate", "Select", "Attend", "Merge"]
    assert [k["start_us"] for k in summary["timeline"]] == [0, 3, 14, 20, 81]


def test_median_over_steps_is_not_moved_by_one_slow_step(path):
    kernels = layer_kernels(STEPS)
    name, start, end, device = kernels[2]
    kernels[2] = (name, start, end + 20_000, device)
    assert summary_of(path, kernels)["stages"]["Attend"] == 60


def test_layers_of_a_step(path):
    """The same records as 5 steps of 4 layers: a step takes four times as long, a layer as long as before."""
    write(path, layer_kernels(STEPS))
    summary = traces.summarize(traces.read_nsys(path)[0], 5, 4, [400.0], 390.0)
    assert summary["stages"]["Attend"] == 240
    assert {kernel["calls"] for kernel in summary["kernels"]} == {4}
    assert [k["stage"] for k in summary["timeline"]] == ["Estimate", "Select", "Attend", "Merge"]


def test_timeline_of_a_step_with_more_than_its_layers(path):
    """Two steps of two layers, each with a kernel before and one after: the layer ends where the next one starts."""
    kernels, at = [], 0
    for names in ["embedding_kernel", "_estimate_kernel", "x", "x", "_estimate_kernel", "x", "x", "argmax"], ["a"]:
        for name in names * (2 if len(names) > 1 else 1):
            kernels.append((name, at, at + 20_000))
            at += 20_000
    write(path, kernels)
    summary = traces.summarize(traces.read_nsys(path)[0], 2, 2, [170.0], 170.0)
    assert [k["name"] for k in summary["timeline"]] == ["_estimate_kernel", "x", "x"]
    assert summary["uneven"] == {"a": 1}


def test_overlapping_kernels_are_busy_once(path):
    kernels = [("_attend_balanced_kernel", t, t + 50_000) for t in range(0, STEPS * 100_000, 100_000)]
    kernels += [("_merge_balanced_kernel", t + 40_000, t + 60_000) for t in range(0, STEPS * 100_000, 100_000)]
    summary = summary_of(path, kernels)
    assert (summary["stages"]["Attend"], summary["stages"]["Merge"]) == (50, 20)
    assert summary["busy_us"] == 60
    assert summary["notes"] == ["kernels overlap by 10.0 us: one that starts early waits within its own time"]


def test_empty_report(path):
    write(path)
    with pytest.raises(ProfilerError, match="recorded no CUDA kernels.*spawn") as caught:
        traces.read_nsys(path)
    assert caught.value.code == 9
    assert "\n" not in str(caught.value)


def test_graph_level_records_instead_of_kernels(path):
    for kernels in ((), layer_kernels(1)):
        write(path, kernels, graphs=10)
        with pytest.raises(ProfilerError, match="recorded 10 CUDA graphs as a whole.*--cuda-graph-trace=node"):
            traces.read_nsys(path)


def test_missing_kernels_are_named(path):
    kernels = layer_kernels(STEPS)
    del kernels[7]
    summary = summary_of(path, kernels)
    assert summary["uneven"] == {"_merge_balanced_kernel": STEPS - 1}


def test_two_gpus(path):
    """Another GPU's kernels neither add to the time nor hide."""
    summary = summary_of(path, layer_kernels(STEPS, device=1) + layer_kernels(STEPS // 2, device=0))
    assert summary["stages"]["Attend"] == 60
    assert summary["notes"] == ["records of GPUs 0, 1: only GPU 1, the busiest, is shown"]


@pytest.mark.parametrize(("numerator", "denominator"), [(1, 1000), (1, 10**6), (1000, 1)], ids=["us", "ms", "ps"])
def test_times_in_another_unit(path, numerator, denominator):
    kernels = [(n, s * numerator // denominator, e * numerator // denominator) for n, s, e, _ in layer_kernels(STEPS)]
    with pytest.raises(ProfilerError, match="cannot be nanoseconds"):
        summary_of(path, kernels)


def test_ends_before_starts(path):
    with pytest.raises(ProfilerError, match="cannot be nanoseconds"):
        summary_of(path, [(name, end, start) for name, start, end, _ in layer_kernels(STEPS)])


def test_unknown_kernel_is_shown_and_a_small_one_is_no_warning(path):
    summary = summary_of(path, layer_kernels(STEPS, extra=[("a_kernel_nobody_knows", 12)]))
    assert summary["stages"]["unclassified"] == 12
    assert summary["unclassified_pct"] == pytest.approx(100 * 12 / 90)
    assert summary["notes"] == ["13.3% of the kernel time is unclassified: a_kernel_nobody_knows"]
    summary = summary_of(path, layer_kernels(STEPS, extra=[("a_kernel_nobody_knows", 1)]))
    assert summary["unclassified_pct"] > 0
    assert summary["notes"] == []


def test_kernel_without_a_name(path):
    import sqlite3

    write(path, layer_kernels(STEPS))
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM StringIds WHERE value = '_select_kernel'")
    database.close()
    assert traces.summarize(traces.read_nsys(path)[0], STEPS, 1, [100], 90)["stages"]["unclassified"] == 5


def test_faster_under_the_profiler_is_said(path):
    write(path, layer_kernels(STEPS))
    summary = traces.summarize(traces.read_nsys(path)[0], STEPS, 1, [100.0], 200.0)
    assert summary["overhead_pct"] == -50
    assert "faster than without the profiler" in summary["notes"][0]


@pytest.mark.parametrize("content", [b"", b"this is no database", None])
def test_unreadable_export(path, content):
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ProfilerError):
        traces.read_nsys(path)


def test_ranges_are_counted_in_our_domain_only(path):
    write(path, layer_kernels(1), ranges=["a", "b"])
    assert traces.read_nsys(path)[1] == 2
    write(path, layer_kernels(1), ranges=["a", "b"], domain="NCCL")
    assert traces.read_nsys(path)[1] == 0
    write(path, layer_kernels(1), ranges=())
    assert traces.read_nsys(path)[1] == 0


def chrome(path, *events):
    """A trace of torch.profiler: (category, name, ts, dur, args or thread)."""
    rows = []
    for cat, name, ts, dur, where in events:
        args = where if isinstance(where, dict) else {}
        rows.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 0,
                "tid": 7 if args else where,
                "ts": ts,
                "dur": dur,
                "args": args,
            }
        )
    rows.append({"ph": "i", "cat": "trace", "name": "Record Window End", "pid": "", "tid": "", "ts": 9})
    with gzip.open(path, "wt") as file:
        json.dump({"schemaVersion": 1, "displayTimeUnit": "ms", "traceEvents": rows}, file)
    return path


def test_torch_trace_of_a_gpu(tmp_path):
    gpu = {"device": 0, "stream": 7, "correlation": 3, "graph node id": 5}
    path = chrome(
        tmp_path / "t.json.gz",
        ("kernel", "_merge_balanced_kernel", 1060.5, 3.0, gpu),
        ("kernel", "_attend_balanced_kernel", 1000.0, 60.0, gpu),
        ("gpu_memset", "Memset (Device)", 990.0, 1.5, gpu),
        ("cuda_runtime", "cudaGraphLaunch", 980.0, 5.0, {"correlation": 3}),
        ("cpu_op", "aten::copy_", 970.0, 100.0, 1),
    )
    records = traces.read_chrome(path, "cuda")
    assert [(r.name, r.start, r.end - r.start) for r in records] == [
        ("[memset]", 990_000, 1500),
        ("_attend_balanced_kernel", 1_000_000, 60_000),
        ("_merge_balanced_kernel", 1_060_500, 3000),
    ]


def test_torch_trace_of_a_cpu_keeps_outermost_operators(tmp_path):
    path = chrome(
        tmp_path / "t.json.gz",
        ("cpu_op", "aten::scaled_dot_product_attention", 100.0, 50.0, 1),
        ("cpu_op", "aten::_scaled_dot_product_flash_attention_for_cpu", 101.0, 48.0, 1),
        ("cpu_op", "aten::empty", 102.0, 1.0, 1),
        ("cpu_op", "aten::index", 150.0, 10.0, 1),
        ("cpu_op", "aten::index", 100.0, 10.0, 2),
    )
    names = [(r.name, r.stream) for r in traces.read_chrome(path, "cpu")]
    assert names == [("aten::scaled_dot_product_attention", 1), ("aten::index", 2), ("aten::index", 1)]


def test_torch_trace_without_kernels(tmp_path):
    path = chrome(tmp_path / "t.json.gz", ("cpu_op", "aten::empty", 1.0, 1.0, 1))
    with pytest.raises(ProfilerError, match="brought back no CUDA kernels"):
        traces.read_chrome(path, "cuda")
    (tmp_path / "bad.json").write_text("[1, 2")
    with pytest.raises(ProfilerError, match="cannot be read"):
        traces.read_chrome(tmp_path / "bad.json", "cuda")


def raw_page(*launches, units=("ns", "byte/s", "%", "register/thread", "byte", "byte")):
    """Nsight Compute's raw page: (kernel name, values of NCU_METRICS)."""
    rows = [["ID", "Process ID", "Kernel Name", "Context", "Stream", *traces.NCU_METRICS], ["", "", "", "", "", *units]]
    rows += [[str(i), "77", name, "1", "7", *values] for i, (name, *values) in enumerate(launches)]
    return "\n".join(",".join(f'"{text}"' for text in row) for row in rows) + "\n"


LAUNCHES = [
    ("_merge_balanced_kernel", "2000", "500000000000", "20.5", "64", "0", "0"),
    ("_attend_balanced_kernel", "60,000", "4100000000000", "18.75", "250", "1,024", "512"),
    ("_attend_balanced_kernel", "62000", "4000000000000", "18.75", "250", "1024", "512"),
    ("_attend_balanced_kernel", "70000", "3900000000000", "18.75", "250", "1024", "512"),
]


def test_counters_of_nsight_compute():
    attend, merge = traces.read_ncu(raw_page(*LAUNCHES))
    assert attend == {
        "name": "_attend_balanced_kernel",
        "stage": "Attend",
        "launches": 3,
        "us": 62,
        "dram_tbps": 4,
        "occupancy_pct": 18.75,
        "registers": 250,
        "local_bytes": 1536,
    }
    assert (merge["stage"], merge["launches"], merge["registers"], merge["local_bytes"]) == ("Merge", 1, 64, 0)


def test_counters_that_cannot_be_used():
    for text in ("", raw_page(), "==WARNING== No kernels were profiled.\n"):
        with pytest.raises(ProfilerError, match="recorded no kernels"):
            traces.read_ncu(text)
    with pytest.raises(ProfilerError, match="gpu__time_duration.sum in 'us', expected ns"):
        traces.read_ncu(raw_page(*LAUNCHES, units=("us", "byte/s", "%", "register/thread", "byte", "byte")))
    with pytest.raises(ProfilerError, match="has no dram__bytes.sum.per_second: this GPU"):
        traces.read_ncu(raw_page(*LAUNCHES).replace("dram__bytes.sum.per_second", "other"))
    with pytest.raises(ProfilerError, match="no gpu__time_duration.sum for _attend_balanced_kernel: 'n/a'"):
        traces.read_ncu(raw_page(("_attend_balanced_kernel", "n/a", "1", "1", "1", "0", "0")))
