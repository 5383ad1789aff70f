"""Random schedules of the barriers of the experimental backward, with its counts.

    python protocol.py [SCHEDULES]

All warps of up to 4 blocks run in a random order; products and copies are asynchronous. Counted are arrivals,
bytes of copies and registers of `setmaxnreg`. It finds deadlocks, memory that is overwritten while products
read it, steps that are missing or made twice, and turns out of order. Planted faults show that it can find
them.
"""

# ruff: noqa: B023  (functions within a loop are called in the same round)

import random


class Bar:
    def __init__(s, n):
        s.n = n
        s.pend = n
        s.phase = 0
        s.tx = 0

    def arrive(s, tx=0):
        s.tx += tx
        s.pend -= 1
        assert s.pend >= 0, "too many arrivals"
        s.done()

    def complete(s, b):
        s.tx -= b
        s.done()

    def done(s):
        if s.pend == 0 and s.tx == 0:
            s.phase += 1
            s.pend = s.n

    def ready(s, par):
        return (s.phase - 1) & 1 == par


class Ring:
    def __init__(s, par, n):
        s.stage = 0
        s.par = par
        s.n = n

    def next(s):
        s.stage += 1
        if s.stage == s.n:
            s.stage = 0
            s.par ^= 1


class Bug(Exception):
    pass


SIZES = {128: (64, 2), 96: (64, 2), 64: (128, 1)}  # rows of a tile, blocks of 64 channels


def run(blocks, lists, seed, order, rotate, ordered, QS, red, plant=0, registers=None, dim=128):
    """lists: tiles in list order: (pair, key block, rows [..]); turns: dict (pair,row)->count."""
    rnd = random.Random(seed)
    DS = 2
    rows_of, d_blocks = SIZES[dim]
    low, high = registers or ((24, 240) if dim == 128 else (40, 232))
    box_q, box_k, stat = rows_of * 128, 128 * 128, 4 * rows_of
    turns = {}
    adds = {}
    counter = [0]
    procs = []
    copies = []
    doneK = []
    first_of = {}
    for p, kb, rows in lists:
        for r in rows:
            first_of[p, r] = min(first_of.get((p, r), 1 << 30), kb)

    def cta(b):
        fk, fv, ekv = Bar(1), Bar(1), Bar(2)
        fi = [Bar(1) for _ in range(2)]
        ei = [Bar(2) for _ in range(2)]
        fq = [Bar(1) for _ in range(QS)]
        eq = [Bar(8) for _ in range(QS)]
        fd = [Bar(1) for _ in range(DS)]
        ed = [Bar(8) for _ in range(DS)]
        fdq = [Bar(4), Bar(4)]
        edq = [Bar(1), Bar(1)]
        fs = [Bar(4), Bar(4)]
        pool = [
            0,
            168 - low,
        ]  # registers free in the block, and what warpgroup 0 will give, in units of 128 threads
        info = [None] * 2
        mem = {"k": [None, None], "v": [None, None]}
        Q = [None] * QS
        DO = [None] * DS
        dS = [[None, None], [None, None]]
        DQ = [None, None]
        sync = [0, 0]  # arrivals of bar.sync(1,256) by warpgroup
        readers = {}  # resource -> set of readers in flight (products run asynchronously)

        def write(res):
            if readers.get(res):
                raise Bug(f"{res} overwritten while read by {readers[res]}")

        def release(bar):
            for _ in range(4):
                bar.arrive()  # lane 0 of each warp

        def loader():
            pool[0] += pool[1]  # setmaxnreg.dec
            q = Ring(1, QS)
            d = Ring(1, DS)
            i = Ring(1, 2)
            kv = 1
            idx = b
            while True:
                yield lambda: ei[i.stage].ready(i.par)
                t = lists[idx] if idx < len(lists) else None
                info[i.stage] = t
                fi[i.stage].arrive()
                if t is None:
                    return
                rows = t[2]

                def ld(bars, ebars, ring, arr, val, name):
                    yield lambda: ebars[ring.stage].ready(ring.par)
                    st = ring.stage
                    bars[st].arrive(d_blocks * rows_of * 128 + stat)
                    for part in [box_q] * d_blocks + [stat]:
                        copies.append((lambda: write((b, name, st)), bars[st], arr, st, val, part))
                    ring.next()

                if rows:
                    yield from ld(fq, eq, q, Q, (t, 0), "q")
                yield lambda: ekv.ready(kv)
                kv ^= 1
                if rows:
                    for bar, nm in ((fk, "k"), (fv, "v")):
                        bar.arrive(128 * 128 * d_blocks)
                        for _ in range(d_blocks):
                            copies.append(
                                (
                                    lambda nm=nm: (write((b, nm, 0)), write((b, nm, 1))),
                                    bar,
                                    mem[nm],
                                    slice(0, 2),
                                    [t, t],
                                    box_k,
                                )
                            )
                    for n in range(len(rows)):
                        if n:
                            yield from ld(fq, eq, q, Q, (t, n), "q")
                        yield from ld(fd, ed, d, DO, (t, n), "d")
                else:
                    fk.arrive()
                    fv.arrive()
                i.next()
                idx = counter[0] + blocks
                counter[0] += 1
                yield lambda: True

        def store(g):
            i = Ring(0, 2)
            dq = 0
            s = 0
            while True:
                yield lambda: fi[i.stage].ready(i.par)
                t = info[i.stage]
                if t is None:
                    return
                if not red:
                    for n, r in enumerate(t[2]):
                        yield lambda: fdq[g].ready(dq)
                        dq ^= 1
                        if ordered:
                            mine = t[1] - first_of[t[0], r]
                            yield lambda: turns.get((t[0], r, g), 0) == mine
                        assert DQ[g] == (t, n), (DQ[g], t, n)
                        adds.setdefault((t[0], r, g), []).append(t[1])
                        yield lambda: True
                        assert DQ[g] == (t, n)
                        if plant != 2:
                            edq[g].arrive()
                        else:
                            edq[g].arrive()
                        if ordered:
                            yield lambda: True
                            turns[t[0], r, g] = turns.get((t[0], r, g), 0) + 1
                yield lambda: fs[g].ready(s)
                s ^= 1
                yield lambda: True
                assert mem["k"][g] == ("dk", t)
                assert mem["v"][g] == ("dv", t)
                doneK.append((t[0], t[1], g))
                ekv.arrive()
                ei[i.stage].arrive()
                i.next()

        def consumer(g):
            q = Ring(0, QS)
            d = Ring(0, DS)
            i = Ring(0, 2)
            kv = 0
            dqp = 1
            ss = 0
            pending = []
            yield lambda: pool[0] >= high - 168  # setmaxnreg.inc
            pool[0] -= high - 168

            def issue(name, *res):
                for r, check in res:
                    assert check(), (name, r)
                    readers.setdefault((b, *r), set()).add((g, name))
                pending.append((name, res))

            def wait(n):
                while len(pending) > n:
                    name, res = pending.pop(0)
                    for r, _ in res:
                        readers[(b, *r)].discard((g, name))

            def barrier():
                sync[g] += 1
                target = sync[g]
                yield lambda: sync[1 - g] >= target

            while True:
                yield lambda: fi[i.stage].ready(i.par)
                t = info[i.stage]
                if t is None:
                    return
                yield lambda: fk.ready(kv)
                rows = t[2]
                N = len(rows)
                n = 0
                ops = {
                    "s": lambda st, n: issue(
                        ("s", n), (("k", g), lambda: mem["k"][g] == t), (("q", st), lambda: Q[st] == (t, n))
                    ),
                    "dp": lambda st, n: issue(
                        ("dp", n), (("v", g), lambda: mem["v"][g] == t), (("d", st), lambda: DO[st] == (t, n))
                    ),
                    "dv": lambda st, n: issue(("dv", n), (("d", st), lambda: DO[st] == (t, n))),
                    "dk": lambda st, n: issue(("dk", n), (("q", st), lambda: Q[st] == (t, n))),
                    "dq": lambda x, n: issue(
                        ("dq", n),
                        (("ds", x, 0), lambda: dS[x][0] == (t, n)),
                        (("ds", x, 1), lambda: dS[x][1] == (t, n)),
                        (("k", 0), lambda: mem["k"][0] == t),
                        (("k", 1), lambda: mem["k"][1] == t),
                    ),
                }

                def weigh(released, n):
                    ops["dv"](d.stage, n)
                    yield lambda: True
                    wait(1)
                    if released is not None:
                        release(eq[released])
                    write((b, "ds", ss, g))
                    dS[ss][g] = (t, n)
                    if rotate:
                        wait(0)
                    if plant != 1:
                        yield from barrier()

                def store_dq(n):
                    nonlocal dqp
                    if red:
                        adds.setdefault((t[0], rows[n], g), []).append(t[1])
                        return
                    yield lambda: edq[g].ready(dqp)
                    dqp ^= 1
                    DQ[g] = (t, n)
                    release(fdq[g])

                if N and rotate:
                    yield lambda: fq[q.stage].ready(q.par)
                    ops["s"](q.stage, 0)
                    yield lambda: fv.ready(kv)
                    yield lambda: fd[d.stage].ready(d.par)
                    ops["dp"](d.stage, 0)
                    wait(1)
                    yield from weigh(None, 0)
                    for n in range(1, N):
                        st = q.stage
                        q.next()
                        yield lambda: fq[q.stage].ready(q.par)
                        ops["dq"](ss, n - 1)
                        ss ^= 1
                        wait(1)
                        release(ed[d.stage])
                        if order == 1:
                            ops["dk"](st, n - 1)
                        ops["s"](q.stage, n)
                        if order == 0:
                            ops["dk"](st, n - 1)
                        yield lambda: True
                        wait(2 if order == 0 else 1)
                        if order == 1:
                            release(eq[st])
                        d.next()
                        yield from store_dq(n - 1)
                        yield lambda: fd[d.stage].ready(d.par)
                        ops["dp"](d.stage, n)
                        yield lambda: True
                        wait(2 if order == 0 else 1)
                        yield from weigh(st if order == 0 else None, n)
                    ops["dq"](ss, N - 1)
                    ss ^= 1
                    ops["dk"](q.stage, N - 1)
                    wait(1)
                    release(ed[d.stage])
                    d.next()
                    yield from store_dq(N - 1)
                    wait(0)
                    release(eq[q.stage])
                    q.next()
                elif N:
                    yield lambda: fv.ready(kv)
                    for n in range(N):
                        yield lambda: fq[q.stage].ready(q.par)
                        ops["s"](q.stage, n)
                        yield lambda: fd[d.stage].ready(d.par)
                        ops["dp"](d.stage, n)
                        wait(1)
                        yield from weigh(None, n)
                        ops["dq"](ss, n)
                        ss ^= 1
                        ops["dk"](q.stage, n)
                        wait(1)
                        release(ed[d.stage])
                        d.next()
                        yield from store_dq(n)
                        wait(0)
                        release(eq[q.stage])
                        q.next()
                else:
                    yield lambda: fv.ready(kv)
                kv ^= 1
                if plant != 3:
                    yield from barrier()
                write((b, "k", g))
                write((b, "v", g))
                mem["k"][g] = ("dk", t)
                mem["v"][g] = ("dv", t)
                assert info[i.stage] == t
                release(fs[g])
                i.next()

        return [loader(), store(0), store(1), consumer(0), consumer(1)]

    for b in range(blocks):
        procs += cta(b)
    waits = [None] * len(procs)
    live = set()
    for p, x in enumerate(procs):
        try:
            waits[p] = next(x)
            live.add(p)
        except StopIteration:
            pass
    while live:
        opts = [p for p in live if waits[p]()]
        n = len(opts) + len(copies)
        if not n:
            raise Bug("deadlock")
        c = rnd.randrange(n)
        if c < len(opts):
            p = opts[c]
            try:
                waits[p] = next(procs[p])
            except StopIteration:
                live.discard(p)
        else:
            check, bar, arr, st, val, part = copies.pop(c - len(opts))
            check()
            arr[st] = val
            bar.complete(part)
    want = {(p, r, g) for p, _, rows in lists for r in rows for g in (0, 1)}
    assert set(adds) == want
    for (p, r, _), order_found in adds.items():
        assert sorted(order_found) == sorted(kb for pp, kb, rows in lists if pp == p and r in rows)
        if ordered:
            assert order_found == sorted(order_found), order_found
    assert sorted(doneK) == sorted((p, kb, g) for p, kb, _ in lists for g in (0, 1))


def case(seed, plant=0, registers=None):
    r = random.Random(seed)
    lists = []
    pairs = r.randrange(1, 4)
    for kb in range(r.randrange(1, 5)):
        for p in range(pairs):
            rows = list(range(kb, r.choice([4, 5, 6]))) if r.random() < 0.8 else []
            lists.append((p, kb, rows))
    # rows of a pair must see all key blocks between: make them causal with one length a pair
    M = {p: r.choice([2, 4, 6]) for p in range(pairs)}
    desc = r.random() < 0.5
    lists = [(p, kb, (list(range(kb, M[p]))[::-1] if desc else list(range(kb, M[p])))) for p, kb, _ in lists]
    rotate = r.random() < 0.75
    run(
        r.randrange(1, 5),
        lists,
        seed,
        r.randrange(2),
        rotate,
        r.random() < 0.5,
        3 if rotate else 2,
        False,
        plant,
        registers,
        r.choice([64, 96, 128]),
    )


if __name__ == "__main__":
    import sys

    N = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
    for s in range(N):
        case(s)
    found = 0
    for s in range(50):
        try:
            case(s, 0, (32, 240))
        except Bug as e:
            found += str(e) == "deadlock"
    print("registers 32, 240 (first run on the device): deadlock in", found, "of 50")
    assert found == 50
    for plant in (1, 3):
        found = 0
        for s in range(300):
            try:
                case(s, plant)
            except (Bug, AssertionError):
                found += 1
        print("planted", plant, "found in", found, "of 300")
        assert found
    print("ok", N)
