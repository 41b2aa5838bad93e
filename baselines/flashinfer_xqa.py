"""FlashInfer's XQA decode kernel, every row a sequence: lengths on the device, no plan.

A row is cut into as many pieces as thread blocks fit the GPU per row, SMs / rows rounded down and the same for every
row; from as many rows as SMs on, each row is one thread block. On a Hopper GPU with a bf16 cache this is the generic
kernel, not the fp8 one that is written for it.
"""

from __future__ import annotations

import torch

from baselines import Attention, flashinfer_decode
from baselines.sequences import Rows
from moira_kernels import UnsupportedError

KIND = "attention"
NEEDS = ("cuda", "flashinfer")

PAGE_SIZES = (16, 32, 64, 128)


class FlashInferXqa(Attention):
    """One call, B * H sequences.

    Whether there are padding rows is read when the arm is made: the kernel leaves NaN where a row without tokens was
    cut, so their outputs are cleared.
    """

    def __init__(self, q, kv, pages):
        super().__init__(q, kv, pages)
        self.rows = Rows(q, self.out, kv, pages)
        s = self.rows.sequences
        head_dim = q.shape[2]
        major = torch.cuda.get_device_capability(q.device)[0]
        if major not in (9, 10, 12):
            raise UnsupportedError(f"XQA needs a GPU of sm_90, sm_100 or sm_120, this is sm_{major}x")
        if kv.page_size not in PAGE_SIZES:
            raise UnsupportedError(f"XQA needs pages of {', '.join(map(str, PAGE_SIZES))} tokens, got {kv.page_size}")
        if q.dtype not in (torch.bfloat16, torch.float16) or head_dim % 16 or head_dim > 256:
            raise UnsupportedError(
                f"XQA needs bf16 or fp16 and a head dimension that is a multiple of 16 up to 256, "
                f"got {q.dtype} and {head_dim}"
            )
        # The kernel has one set of strides for keys and values, in units of D.
        if s.k.stride() != s.v.stride() or any(stride % head_dim for stride in s.k.stride()[:3]):
            raise UnsupportedError(
                f"XQA needs equal strides of K and V, multiples of D, got {kv.k.stride()}, {kv.v.stride()}"
            )
        self.semaphores = torch.zeros(pages.num_rows, dtype=torch.int32, device=q.device).view(torch.uint32)
        self.seq_lens = s.seq_lens[:, None].view(torch.uint32)
        self.empty = (s.seq_lens == 0)[:, None, None] if int(s.seq_lens.min()) == 0 else None
        self.implementation = flashinfer_decode.name()

    def plan(self) -> dict[str, float]:
        """Device work only: ids and lengths for the lists as they are."""
        self.rows.refresh()
        return {}

    def run(self) -> None:
        """Attend."""
        from flashinfer.xqa import xqa

        s = self.rows.sequences
        xqa(
            s.q[:, None],
            s.k,
            s.v,
            s.page_table,
            self.seq_lens,
            s.out[:, None],
            flashinfer_decode.workspace(s.q.device),
            self.semaphores,
            num_kv_heads=1,
            page_size=s.page_size,
        )
        if self.empty is not None:
            s.out.masked_fill_(self.empty, 0)


ARM = FlashInferXqa
