"""Builds SQLite exports with the tables of Nsight Systems 2023.4 (its user guide, 'SQLite Schema Reference')."""

import sqlite3
from contextlib import closing

COMMON = "start INTEGER NOT NULL, end INTEGER NOT NULL, deviceId INTEGER NOT NULL, contextId INTEGER NOT NULL, "
TABLES = {
    "StringIds": "id INTEGER NOT NULL PRIMARY KEY, value TEXT NOT NULL",
    "CUPTI_ACTIVITY_KIND_KERNEL": COMMON
    + "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, demangledName INTEGER NOT NULL, "
    "shortName INTEGER NOT NULL, mangledName INTEGER, launchType INTEGER, cacheConfig INTEGER, "
    "registersPerThread INTEGER NOT NULL, gridX INTEGER NOT NULL, gridY INTEGER NOT NULL, gridZ INTEGER NOT NULL, "
    "blockX INTEGER NOT NULL, blockY INTEGER NOT NULL, blockZ INTEGER NOT NULL, staticSharedMemory INTEGER NOT NULL, "
    "dynamicSharedMemory INTEGER NOT NULL, localMemoryPerThread INTEGER NOT NULL, localMemoryTotal INTEGER NOT NULL, "
    "gridId INTEGER NOT NULL, sharedMemoryExecuted INTEGER, graphNodeId INTEGER, sharedMemoryLimitConfig INTEGER",
    "CUPTI_ACTIVITY_KIND_MEMSET": COMMON
    + "streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, value INTEGER NOT NULL, "
    "bytes INTEGER NOT NULL, graphNodeId INTEGER, memKind INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": COMMON
    + "greenContextId INTEGER, streamId INTEGER NOT NULL, correlationId INTEGER, globalPid INTEGER, "
    "graphId INTEGER NOT NULL, graphExecId INTEGER NOT NULL",
    "NVTX_EVENTS": "start INTEGER NOT NULL, end INTEGER, eventType INTEGER NOT NULL, rangeId INTEGER, "
    "category INTEGER, color INTEGER, text TEXT, globalTid INTEGER, endGlobalTid INTEGER, textId INTEGER, "
    "domainId INTEGER, uint64Value INTEGER, int64Value INTEGER, doubleValue REAL, uint32Value INTEGER, "
    "int32Value INTEGER, floatValue REAL, jsonTextId INTEGER, jsonText TEXT",
}


def write(path, kernels=(), *, graphs=0, memsets=(), ranges=("replays",), domain="moira"):
    """An export with ``kernels`` (name, start, end[, device]) and ``memsets`` (start, end), in nanoseconds.

    As nsys does, a table is made only if it has rows.
    """
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        made = set()

        def insert(table, **values):
            if table not in made:
                database.execute(f"CREATE TABLE {table} ({TABLES[table]})")
                made.add(table)
            required = [c.split()[0] for c in TABLES[table].split(", ") if "NOT NULL" in c and "KEY" not in c]
            values = dict.fromkeys(required, 0) | values
            marks = ", ".join("?" * len(values))
            cursor = database.execute(
                f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks})", tuple(values.values())
            )
            return cursor.lastrowid

        ids = {}
        for name, start, end, *device in kernels:
            if name not in ids:
                ids[name] = insert("StringIds", value=name)
            insert(
                "CUPTI_ACTIVITY_KIND_KERNEL",
                start=start,
                end=end,
                deviceId=device[0] if device else 0,
                streamId=7,
                demangledName=ids[name],
                shortName=ids[name],
                graphNodeId=1,
            )
        for start, end in memsets:
            insert("CUPTI_ACTIVITY_KIND_MEMSET", start=start, end=end, streamId=7, bytes=64)
        for number in range(graphs):
            insert("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", start=1000 * number, end=1000 * number + 900, streamId=7)
        if ranges:
            insert("NVTX_EVENTS", start=1, eventType=75, text=domain, domainId=1)
            for text in ranges:
                insert("NVTX_EVENTS", start=2, end=3, eventType=59, textId=insert("StringIds", value=text), domainId=1)
        database.commit()


def layer_kernels(steps, *, step_us=100, start=1_000_000, device=0, extra=()):
    """Kernels of ``steps`` steps of ``step_us``: (name, start, end, device).

    Of 100 us Estimate takes 10, Select 5, Attend 60, Merge 3 and ``extra`` (name, us) follow, 1 us between two.
    """
    durations = [("_estimate_kernel", 10), ("_select_kernel", 5), ("_attend_balanced_kernel", 60)]
    durations += [("_merge_balanced_kernel", 3), *extra]
    ns = round(10 * step_us)
    found = []
    for step in range(steps):
        at = start + step * 100 * ns
        for name, us in durations:
            found.append((name, at, at + us * ns, device))
            at += us * ns + ns
    return found
