"""`moira verify`: every kernel against its reference on this machine, with figures.

On a GPU the kernels are compiled; on a CPU they run in Triton's interpreter, at small shapes. The tests check more
cases; this is the short proof that the kernels are right where they will be measured.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from moira_cli.errors import ExitCode

if TYPE_CHECKING:
    import torch

GAMMAS = (0.9, 0.95, 0.98, 0.99)


@dataclass(frozen=True)
class Check:
    """One line: what was compared, what came out, what is allowed, and whether it holds (None: could not run here)."""

    name: str
    measured: str
    limit: str
    ok: bool | None


class Verification:
    """The checks over one random batch: rows of many, few, one and no pages."""

    def __init__(self, device: torch.device):
        import torch

        from moira_kernels.pipeline import DecodeLayer
        from moira_kernels.testing import Geometry, make_case

        self.device = device
        on_gpu = device.type == "cuda"
        self.geometry = Geometry(32, 8, 128) if on_gpu else Geometry(8, 2, 32)
        lens = [30_000, 5_000, 64, 1, 0, 12_345] if on_gpu else [900, 300, 64, 1, 0]
        self.q, self.kv = make_case(lens, self.geometry, device=device)
        self.q *= 3  # sharper than N(0, 1) attention, so that the rule has something to leave out
        self.layer = DecodeLayer.allocate(self.kv, self.geometry.num_q_heads)
        rows = zip(self.kv.block_table, lens, strict=True)
        self.full = torch.cat([table[: n // self.kv.page_size] for table, n in rows])
        self.layer.prefill(self.kv, self.full)

    def run(self) -> Iterator[Check]:
        """Every check, in the order of a decode step."""
        yield self.summary()
        yield self.estimate()
        yield from self.select()
        yield from self.attend()
        yield from self.dense()
        yield self.repeats()
        yield from self.batch()
        yield self.graph()

    def summary(self) -> Check:
        """Mean and variance against float32, in bf16 roundings of the value."""
        from moira_kernels.summary import PageSummaries, update_reference
        from moira_kernels.testing import bf16_ulp

        want = PageSummaries.allocate(self.kv)
        update_reference(want, self.kv, self.full.long())
        worst = 0.0
        for name in ("mean", "variance"):
            got, ref = (getattr(s, name)[self.full.long()].float() for s in (self.layer.summaries, want))
            worst = max(worst, ((got - ref).abs() / bf16_ulp(ref)).max().item())
        return Check("summary: mean, variance against float32", f"{worst:.2f} bf16 ulp", "1 bf16 ulp", worst <= 1)

    def estimate(self) -> Check:
        """Log masses against float32 on the same summaries."""
        from moira_kernels import estimate

        estimate.launch(self.q, self.kv, self.layer.summaries, self.layer.log_mass)
        want = estimate.reference(self.q, self.kv, self.layer.summaries)
        valid = want > -float("inf")
        error = (self.layer.log_mass - want)[valid].abs().max().item()
        limit = 1e-4 + 1e-5 * want[valid].abs().max().item()
        return Check("estimate: log mass against float32", f"{error:.1e}", f"{limit:.1e}", error <= limit)

    def _lists_equal(self, log_mass: torch.Tensor, num_pages: list[int], **rule) -> tuple[int, int]:
        """(rows whose list equals the reference's, rows) for log masses [B, H * G, P] of one list per row."""
        import torch

        from moira_kernels import RaggedPages, selection
        from moira_kernels.testing import Geometry, make_case

        B, _, P = log_mass.shape
        _, kv = make_case(num_pages, Geometry(1, 1, 1), page_size=1, device=self.device)
        lists = RaggedPages(
            *(torch.zeros(shape, dtype=torch.int32, device=self.device) for shape in ((B, 1, P), (B, 1), (B, 1)))
        )
        selection.launch(log_mass, kv, lists, **rule)
        shares = selection.group_shares(log_mass, 1)
        if "gamma" in rule:
            keep = selection.coverage_bisection(shares, kv.num_pages(), rule["gamma"])
        else:
            keep = selection.largest(shares, kv.num_pages(), rule["counts"].expand(B, 1))
        want = selection.compact(keep, kv)
        same = 0
        for b in range(B):
            n = int(want.lengths[b, 0])
            equal = int(lists.lengths[b, 0]) == n
            same += equal and torch.equal(lists.page_ids[b, 0, :n], want.page_ids[b, 0, :n])
        return same, B

    def select(self) -> Iterator[Check]:
        """Lists against the reference on 64 rows of real and 64 of synthetic masses, at every gamma, and by count."""
        import torch

        from moira_cli.lists import SHIPPED, load_recorded

        recorded = load_recorded(SHIPPED)
        real = torch.from_numpy(recorded.log_mass).float().to(self.device)
        real_pages = recorded.num_pages[recorded.sample[:, 0]].tolist()
        generator = torch.Generator().manual_seed(0)
        pages = [256, 255, 100, 17, 3, 2, 1, 200] * 8
        synthetic = 3 * torch.randn(64, 4, 256, generator=generator).to(self.device)
        beyond = torch.arange(256, device=self.device) >= torch.tensor(pages, device=self.device)[:, None, None]
        synthetic.masked_fill_(beyond, -float("inf"))
        for name, masses, lengths in (("real", real, real_pages), ("synthetic", synthetic, pages)):
            results = [self._lists_equal(masses, lengths, gamma=gamma) for gamma in GAMMAS]
            same, rows = (sum(column) for column in zip(*results, strict=True))
            label = f"select: coverage, {name} masses, gamma {GAMMAS[0]:g}-{GAMMAS[-1]:g}"
            yield Check(label, f"{same}/{rows} rows equal", f"{rows}/{rows}", same == rows)
        counts = torch.tensor([20], dtype=torch.int32, device=self.device)
        same, rows = self._lists_equal(synthetic, pages, counts=counts)
        yield Check("select: 20 pages a row", f"{same}/{rows} rows equal", f"{rows}/{rows}", same == rows)

    def attend(self) -> Iterator[Check]:
        """Attention over the selected lists, with both partitions."""
        from moira_kernels import Workspace, attend, attention, selection
        from moira_kernels.testing import max_abs_error, tolerance

        selection.launch(self.layer.log_mass, self.kv, self.layer.pages, gamma=0.95)
        q, kv, pages = self.q, self.kv, self.layer.pages
        truth, lse = attention.reference(q, kv, pages)
        limit = tolerance(truth, attention.reference(q, kv, pages, dtype=q.dtype)[0])
        blocks = None if self.device.type == "cuda" else 6
        for partition in ("balanced", "eq4"):
            workspace = Workspace.allocate(
                kv.batch, q.shape[1], kv.num_kv_heads, kv.head_dim, self.device, partition, blocks
            )
            out, got_lse = attend(q, kv, pages, workspace=workspace, return_lse=True)
            error = max_abs_error(out, truth)
            lse_error = (got_lse - lse).nan_to_num(0.0).abs().max().item()
            yield Check(
                f"attend + merge, {partition}: output; LSE",
                f"{error:.1e}; {lse_error:.1e}",
                f"{limit:.1e}; 1e-02",
                error <= limit and lse_error <= 1e-2,
            )

    def dense(self) -> Iterator[Check]:
        """gamma = 1 keeps every page: dense attention within one bf16 ulp of the largest output."""
        import baselines
        from moira_kernels import attention
        from moira_kernels.testing import bf16_ulp, max_abs_error

        out = self.layer.run(self.q, self.kv, gamma=1.0).clone()
        truth, _ = attention.reference(self.q, self.kv, baselines.all_pages(self.kv))
        ulp = bf16_ulp(truth.abs().max()).item()
        others = {"dense float32 PyTorch": truth}
        missing = baselines.describe()["dense-fa3"].missing(self.device.type)
        if missing is None:
            fa3 = baselines.load("dense-fa3")(self.q, self.kv, self.layer.pages)
            fa3.plan()
            fa3.run()
            others["dense FA3"] = fa3.out
        for name, want in others.items():
            error = max_abs_error(out, want.float()) / ulp
            yield Check(f"gamma 1 against {name}", f"{error:.2f} bf16 ulp", "1 bf16 ulp", error <= 1)
        if missing is not None:
            yield Check("gamma 1 against dense FA3", missing, "1 bf16 ulp", None)

    def repeats(self, times: int = 10) -> Check:
        """The same step again gives the same bits."""
        import torch

        first = self.layer.run(self.q, self.kv, gamma=0.95).clone()
        same = sum(torch.equal(self.layer.run(self.q, self.kv, gamma=0.95), first) for _ in range(times))
        return Check("repeats", f"{same}/{times} equal bits", f"{times}/{times}", same == times)

    def batch(self) -> Iterator[Check]:
        """A request alone and in the batch: the same list; an output that may differ in rounding."""
        import torch

        from moira_kernels import PagedKV
        from moira_kernels.pipeline import DecodeLayer
        from moira_kernels.testing import bf16_ulp

        together = self.layer.run(self.q, self.kv, gamma=0.95).clone()
        lengths = self.layer.pages.lengths.clone()
        ids = self.layer.pages.page_ids.clone()
        same, worst = 0, 0.0
        for b in range(self.kv.batch):
            kv = PagedKV(self.kv.k, self.kv.v, self.kv.block_table[b : b + 1], self.kv.seq_lens[b : b + 1])
            alone = DecodeLayer.allocate(kv, self.geometry.num_q_heads)
            alone.prefill(kv, self.full)
            out = alone.run(self.q[b : b + 1], kv, gamma=0.95)
            same += torch.equal(alone.pages.lengths[0], lengths[b]) and all(
                torch.equal(alone.pages.page_ids[0, h, : lengths[b, h]], ids[b, h, : lengths[b, h]])
                for h in range(kv.num_kv_heads)
            )
            worst = max(worst, (out.float() - together[b : b + 1].float()).abs().max().item())
        ulp = bf16_ulp(together.abs().max()).item()
        rows = self.kv.batch
        yield Check("lists of a request alone and in the batch", f"{same}/{rows} equal", f"{rows}/{rows}", same == rows)
        yield Check(
            "its output alone and in the batch", f"{worst / ulp:.2f} bf16 ulp apart", "1 bf16 ulp", worst <= ulp
        )

    def graph(self) -> Check:
        """A captured step replayed with other lengths, against eager steps, bit for bit."""
        import torch

        name = "CUDA-graph replay of other batches against eager"
        if self.device.type != "cuda":
            return Check(name, "needs a CUDA GPU", "4/4", None)
        lens = self.kv.seq_lens.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.layer.run(self.q, self.kv, gamma=0.95)
        same = 0
        for step in range(4):
            self.kv.seq_lens.copy_((lens - 64 * step - step).clamp(min=0))
            self.layer.out.fill_(float("nan"))
            graph.replay()
            replayed = self.layer.out.clone()
            same += torch.equal(self.layer.run(self.q, self.kv, gamma=0.95), replayed)
        self.kv.seq_lens.copy_(lens)
        return Check(name, f"{same}/4 equal bits", "4/4", same == 4)


def verify(json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False) -> None:
    """Compare every kernel with its float32 reference on this machine and print the figures.

    Without a GPU the kernels run in Triton's interpreter at small shapes, which takes about a minute.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is first imported, which is below
    from moira_cli import environment
    from moira_cli.records import dumps
    from moira_cli.render import new_console, new_table

    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    checks = list(Verification(device).run())
    env = environment.describe(str(device))
    if json_output:
        print(dumps({"env": env, "tool": environment.code_version(), "checks": [asdict(c) for c in checks]}, indent=1))
    else:
        console = new_console()
        where = env["gpu"]["name"] if on_gpu else f"Triton's interpreter on the CPU ({env['cpu']})"
        console.print(f"{where}, torch {env['libraries']['torch']}, triton {env['libraries']['triton']}")
        table = new_table("check", "measured", "allowed", "", left=1)
        for check in checks:
            table.add_row(check.name, check.measured, check.limit, {True: "ok", False: "WRONG", None: "-"}[check.ok])
        console.print(table)
    if any(check.ok is False for check in checks):
        raise typer.Exit(ExitCode.WRONG_RESULT)
