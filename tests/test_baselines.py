import pytest
import torch

import baselines
from moira_kernels import attention
from moira_kernels.testing import Geometry, assert_close, make_case
from tests.test_attention import random_lists


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


def test_unknown_arm():
    with pytest.raises(KeyError):
        baselines.load("nope")


@pytest.mark.parametrize("name", baselines.names())
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
    lists = baselines.all_pages(kv) if arm.dense else pages
    assert_close(arm.out, attention.reference(q, kv, lists)[0], attention.reference(q, kv, lists, dtype=q.dtype)[0])
    assert arm.moved_bytes() >= int(lists.num_tokens(64).sum()) * 2 * 32 * 2
    assert torch.equal(arm.q, q)
