"""Every kernel compiles for every supported architecture, without a GPU, and its shared memory fits (case J5).

In a process of its own: here the kernels may be in Triton's interpreter, which accepts what the compiler refuses.
"""

import json
import subprocess
import sys

import pytest

from tests.test_cli import ENVIRONMENT

SHARED_BYTES_PER_BLOCK = {80: 163 * 1024, 90: 227 * 1024, 120: 99 * 1024}

SCRIPT = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from moira_cli import timing
from moira_kernels import attention, estimate, merge, selection, summary

arch, head_dim, page_size = map(int, sys.argv[1:])
POINTERS = {
    "fp32": ("lse_ptr", "partial_ptr", "partial_lse_ptr", "log_mass_ptr"),
    "bf16": ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "key_ptr", "mean_ptr", "variance_ptr"),
}
FLOATS = ("scale", "scale_log2", "gamma")
heads = dict(NUM_LISTS=8, GROUP=3, HEAD_DIM=head_dim)
block_d = triton.next_power_of_2(head_dim)
attend = dict(heads, LISTS_PER_KV_HEAD=1, BLOCK_G=16, BLOCK_D=block_d, PAGE_SIZE=page_size, TILE=32, INTERPRETED=False)
select = dict(NUM_LISTS=8, GROUP=3, BLOCK_G=4, PAGE_SIZE=page_size, BLOCK_P=1024, SHORT_P=256, KEEP_ALL=False)
select = dict(select, THRESHOLDS=4, PASSES=11, PDL=arch >= 90)
pages = dict(HEAD_DIM=head_dim, PAGE_SIZE=page_size, TILE_S=min(32, page_size), BLOCK_D=block_d)
shape = attention.launch_shape(head_dim, 228 * 1024)
parts = dict(heads, HEADS=2, BLOCK_D=block_d)
masses = dict(pages, GROUP=3, BLOCK_G=16, TILE=32, PDL=arch >= 90, INTERPRETED=False)
cuts = dict(parts, PAGE_SIZE=page_size, ATTEND_TILE=32)
launch = dict(num_warps=shape.num_warps, num_stages=shape.num_stages)
pdl = arch >= 90
KERNELS = [
    (attention._attend_balanced_kernel, dict(attend, ROWS=256, ONE_PASS=True, PDL=pdl), launch),
    (attention._attend_balanced_kernel, dict(attend, ROWS=4096, ONE_PASS=False, PDL=pdl), launch),
    (attention._attend_eq4_kernel, dict(attend, BLOCKS_PER_ROW=32, MIN_CHUNK=24), launch),
    (merge._merge_eq4_kernel, dict(parts, BLOCKS_PER_ROW=32, MIN_CHUNK=24, TILE=16), {}),
    (merge._merge_balanced_kernel, dict(cuts, ROWS=256, ONE_PASS=True, PDL=pdl, TILE=16), {}),
    (merge._merge_balanced_kernel, dict(cuts, ROWS=4096, ONE_PASS=False, PDL=pdl, TILE=64), {}),
    (estimate._estimate_kernel, masses, {}),
    (estimate._estimate_kernel, masses, dict(half=("q_ptr", "k_ptr"))),
    (selection._select_kernel, dict(select, FIXED_COUNT=False), {}),
    (selection._select_kernel, dict(select, FIXED_COUNT=True), {}),
    (summary._update_kernel, pages, {}),
    (timing._read_kernel, dict(BLOCK=4096), dict(num_warps=8)),
]
result = {}
for kernel, constants, options in KERNELS:
    half = options.pop("half", ())
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        dtype = next((d for d, names in POINTERS.items() if name in names), "i32")
        if name in half:
            dtype = "fp16"
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = "*" + dtype
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
        if name.endswith("_ptr") or name.startswith("stride"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    result[f"{kernel.__name__} {constants} {half}"] = compiled.metadata.shared
# Case I4: the number of rows, which changes from step to step, compiles nothing new.
for kernel in (attention._attend_balanced_kernel, merge._merge_balanced_kernel):
    assert [p.do_not_specialize for p in kernel.params if p.name == "num_rows"] == [True]
print(json.dumps(result))
"""


@pytest.mark.parametrize(
    ("arch", "head_dim", "page_size"), [(90, 128, 64), (90, 96, 16), (90, 256, 128), (80, 128, 64), (120, 128, 64)]
)
def test_every_kernel_compiles_and_fits(arch, head_dim, page_size):
    command = [sys.executable, "-c", SCRIPT, str(arch), str(head_dim), str(page_size)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shared = json.loads(done.stdout)
    assert len(shared) == 12
    assert max(shared.values()) <= SHARED_BYTES_PER_BLOCK[arch]
