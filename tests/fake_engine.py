"""Stands in for ``moira_cli.serving_child``: speaks its protocol without an engine, and fails as FAKE_ENGINE asks.

FAKE_ENGINE is a JSON object: ``{"moira": "crash"}`` lets the arm ``moira`` crash after its first shape. Otherwise the
time per token is 10 ms for dense arms and 5 ms for sparse ones, the same in every step.
"""

import json
import os
import signal
import sys
import time

spec = json.loads(open(sys.argv[1]).read())  # noqa: SIM115
what = json.loads(os.environ.get("FAKE_ENGINE", "{}")).get(spec["arm"], "")


def say(event, **fields):
    print(json.dumps({"event": event, **fields}), flush=True)


def result(shape):
    tokens, batch, sparse = spec["tokens"], shape["batch"], spec["settings"] is not None
    reused = batch * ((shape["context_tokens"] - 1) // 64) * 64 if spec["reuse_prefill"] else 0
    tpot = 5.0 if sparse else 10.0
    repetition = {
        "seconds": tpot * tokens / 1e3,
        "request_tpot_ms": [tpot] * batch,
        "step_ms": tpot,
        "steps": tokens - 1,
        "full_graph_steps": tokens - 1,
        "padded_steps": 0,
        "modes": ["FULL"],
        "tokens_out": batch * tokens,
        "cached_tokens": reused,
        "preemptions": 0,
        "kv_used": 0.5,
    }
    changes = {
        "preempted": {"preemptions": 3},
        "no-graph": {"full_graph_steps": tokens - 10, "modes": ["FULL", "PIECEWISE"]},
        "padded": {"padded_steps": 2},
        "short": {"tokens_out": batch * tokens - 1},
        "uncached": {"cached_tokens": 0},
        "apart": {"steps": 3, "full_graph_steps": 3},
    }
    read = sum(map(sum, shape["counts"])) * 4 if shape["counts"] else 4
    rows = spec["repetitions"] * batch * (tokens - 1)
    pages = {"sparse_rows": rows, "dense_rows": 0, "pages_read": read, "pages_total": 2 * read}
    pages |= {"dense-rows": {"dense_rows": 2}, "lost-rows": {"sparse_rows": 4}}.get(what, {})
    return {
        "prefill": {"seconds": 1.0, "ttft_ms": [900.0] * batch, "cached_tokens": 64 * (what == "old-prompts")},
        "repetitions": [{**repetition, **changes.get(what, {})} for _ in range(spec["repetitions"])],
        "pages": pages if sparse else None,
        "health": {"before": {}, "after": {"throttle_reasons": 0x8 * (what == "throttled")}},
    }


print("what a library prints", file=sys.stderr)
if what == "fails":
    say("failed", reason="ValueError: no such backend", oom=False)
    sys.exit(1)
if what == "oom":
    say("failed", reason="OutOfMemoryError: 20 GiB", oom=True)
    sys.exit(1)
if what == "garbage":
    print("INFO hello")
say("log", message="Loading weights")
say("engine", start_s=1.0, kv_capacity_tokens=900_000, cudagraph_mode="FULL_AND_PIECEWISE", backends=[spec["backend"]])
for number, shape in enumerate(spec["shapes"]):
    say("progress", shape=shape["label"], message="prefill")
    if number == 1 and what == "crash":
        print("RuntimeError: illegal memory access", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "silent" or (number == 1 and what == "waits"):
        time.sleep(600)
    if what == "unfit":
        say("unfit", shape=shape["label"], reason=f"{shape['label']} needs 9 tokens of KV cache, the engine has 8")
    else:
        say("result", shape=shape["label"], **result(shape))
    if what == "leaves":
        sys.exit(0)
say("done")
