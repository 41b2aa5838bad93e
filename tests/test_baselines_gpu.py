"""Every arm on a GPU: float32, CUDA-graph replay, and for graph-safe arms lists that change between replays."""

import pytest
import torch

import baselines
from baselines import page_sets
from moira_kernels import MoiraError, attention
from moira_kernels.testing import Geometry, assert_close, make_case, max_abs_error, poison
from tests.test_baselines import RAGGED, check_against_float32, ragged_lists

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # warnings of the libraries

SEQ_LENS = [*RAGGED, 5000, 20000]


def make_arm(name, group, layout, seq_lens=SEQ_LENS, page_size=64, head_dim=128):
    """The arm over ragged lists, or a skip that says why it cannot run here."""
    if reason := baselines.describe()[name].missing("cuda"):
        pytest.skip(reason)
    q, kv = make_case(seq_lens, Geometry(2 * group, 2, head_dim), page_size=page_size, layout=layout, device="cuda")
    try:
        arm = baselines.load(name)(q, kv, ragged_lists(q, kv))
        arm.plan()
    except MoiraError as error:
        pytest.skip(f"{name}: {error}")
    return arm


def clear_and_run(arm, run):
    """The output of ``run`` into a poisoned output."""
    arm.out.fill_(float("nan"))
    run()
    torch.cuda.synchronize()
    return arm.out.clone()


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("group", [1, 4, 7])
@pytest.mark.parametrize("name", baselines.names())
def test_arm_eager_and_in_a_graph(name, group, layout):
    arm = make_arm(name, group, layout)
    lists = arm.attended()
    truth = attention.reference(arm.q, arm.kv, lists)[0]
    low = attention.reference(arm.q, arm.kv, lists, dtype=arm.q.dtype)[0]
    poison(arm.kv, lists)
    eager = clear_and_run(arm, arm.run)
    assert_close(eager, truth, low)
    assert torch.equal(clear_and_run(arm, arm.run), eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm.run()
    for _ in range(2):
        assert torch.equal(clear_and_run(arm, graph.replay), eager)


@pytest.mark.parametrize("name", baselines.names())
def test_lists_change_between_replays(name):
    arm = make_arm(name, 4, "nhd")
    if not arm.graph_safe:
        pytest.skip(f"{name} has to be planned on the host")
    given = getattr(arm, "given", arm.pages)
    clear_and_run(arm, arm.run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arm.run()
    for seed in (1, 2, 0):
        page_sets.overwrite(given, ragged_lists(arm.q, arm.kv, seed))
        arm.plan()
        clear_and_run(arm, graph.replay)
        check_against_float32(arm)
        assert page_sets.missed(arm.attended(), arm.kv, given) == 0


@pytest.mark.parametrize("name", baselines.names())
def test_more_rows_than_fa3_splits(name):
    """Over 992 sequences FA3 gives each one split; over 264 rows FlashInfer's grid has none to spare."""
    arm = make_arm(name, 4, "nhd", seq_lens=[300, 64, 1, 900] * 128)
    clear_and_run(arm, arm.run)
    check_against_float32(arm)


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 128), (128, 128), (64, 64)])
@pytest.mark.parametrize("name", sorted(set(baselines.names()) - {"flashinfer-xqa"}))  # it compiles for every size
def test_other_sizes(name, page_size, head_dim):
    arm = make_arm(name, 4, "hnd", page_size=page_size, head_dim=head_dim)
    clear_and_run(arm, arm.run)
    check_against_float32(arm)


@pytest.mark.parametrize("name", ["padding", "pow2-buckets"])
def test_arms_with_a_choice_say_what_ran(name):
    arm = make_arm(name, 4, "nhd")
    fa3 = baselines.describe()["fa3-varlen"].missing("cuda") is None and torch.cuda.get_device_capability()[0] == 9
    assert arm.implementation.startswith("FA3 of " if fa3 else "moira_kernels.attend (")


def test_stale_metadata_costs_balance_only():
    """fa3-varlen's metadata is of other lengths in the worst case: still the right output."""
    arm = make_arm("fa3-varlen", 4, "nhd")
    page_sets.overwrite(arm.pages, ragged_lists(arm.q, arm.kv, 5))
    arm.rows.refresh()
    clear_and_run(arm, arm.run)
    check_against_float32(arm)


def test_dense_arms_agree():
    outputs = {}
    for name in ("dense-fa3", "dense-flashinfer"):
        try:
            arm = make_arm(name, 4, "nhd")
        except pytest.skip.Exception:
            continue
        outputs[name] = clear_and_run(arm, arm.run)
    if len(outputs) < 2:
        pytest.skip("needs FA3 and FlashInfer")
    assert max_abs_error(outputs["dense-fa3"], outputs["dense-flashinfer"].float()) < 0.02
