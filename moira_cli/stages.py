"""Which stage of a decode step a GPU kernel belongs to, by its name: the one table of patterns.

A kernel of a CUDA-graph replay carries no range, so its name is all there is. The first pattern found in it decides.
What no pattern knows is ``unclassified`` and is always shown: a new kernel must not hide among the known ones.
"""

from __future__ import annotations

import re

UNCLASSIFIED = "unclassified"
PATTERNS = (
    # This project's Triton kernels; Triton names a kernel like its function.
    ("Attend", r"^_attend_\w*kernel"),
    ("Estimate", r"^_estimate_\w*kernel"),
    ("Select", r"^_select_\w*kernel"),
    ("Merge", r"^_merge_\w*kernel"),
    ("Update", r"^_update_\w*kernel"),
    # Attention of the libraries. The namespace `flash` is FlashAttention's; its kernels are template arguments of
    # cutlass::device_kernel, so this comes before GEMM. PyTorch's copy is `pytorch_flash`.
    ("FA3", r"\bflash::"),
    ("FlashInfer", r"\bflashinfer::|\bkernel_mha|\bxqa"),
    ("SDPA", r"pytorch_flash::|fmha_|cudnn\w*sdpa|scaled_dot_product"),
    # Matrix multiplications: cuBLAS (nvjet on Hopper), CUTLASS, DeepGEMM, and split-K sums that belong to them.
    ("GEMM", r"(?i)gemm|gemv|nvjet|cublas|splitk|cutlass.*tensorop"),
    # Known and none of the above.
    ("rest", r"^\[mem|^_(count|table|compress)_kernel"),
    ("rest", r"\bat::|\bat_cuda_detail::|\bcub::|\bthrust::|\bc10::|^aten::|^triton_(poi|red|per|tem)_"),
    ("rest", r"\bvllm::|rms_norm|rotary|act_and_mul|reshape_and_cache|topk|argmax|softmax|embedding|nccl"),
)
"""(stage, regular expression), in the order they are tried."""
STAGES = (*dict.fromkeys(stage for stage, _ in PATTERNS), UNCLASSIFIED)
"""Every stage, in the order of tables and pictures."""
_COMPILED = [(stage, re.compile(pattern)) for stage, pattern in PATTERNS]


def classify(name: str) -> str:
    """The stage of a kernel with this (demangled) name, or UNCLASSIFIED."""
    bare = name.removeprefix("void ")
    return next((stage for stage, pattern in _COMPILED if pattern.search(bare)), UNCLASSIFIED)
