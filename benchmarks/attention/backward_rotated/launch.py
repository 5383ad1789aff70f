"""Launches the experimental backward: tensor maps, workspace, list of tiles, argument of the kernels."""

import math
import struct

import cupy
import numpy as np
import torch
from cuda.bindings import driver
from tile_list import FAR, tile_list

END = 1 << 30  # size of axis 1 of the maps of variable length
SMS = torch.cuda.get_device_properties(0).multi_processor_count
# Debug builds write it from the device; the host can read it at any time.
RECORDS = torch.zeros(SMS * 12, 4, dtype=torch.int32).pin_memory()


def print_waits():
    """Print where the waits of a debug build stand that did not end."""
    r = RECORDS.numpy()
    for w in [w for w in range(len(r)) if r[w, 0]][:40]:
        b, parity, low, high = (int(x) for x in r[w])
        stages = 3
        names = [
            "full_k",
            "full_v",
            "empty_kv",
            *(f"full_info{i}" for i in range(2)),
            *(f"empty_info{i}" for i in range(2)),
            *(f"full_q{i}" for i in range(stages)),
            *(f"empty_q{i}" for i in range(stages)),
            "full_dout0",
            "full_dout1",
            "empty_dout0",
            "empty_dout1",
            "full_dq0",
            "full_dq1",
            "empty_dq0",
            "empty_dq1",
            "full_sums0",
            "full_sums1",
        ]
        name = names[b - 1] if b <= len(names) else "turn"
        state = f"{high & 0xFFFFFFFF:08x} {low & 0xFFFFFFFF:08x}"
        print(
            f"  waits: block {w // 12} warp {w % 12} barrier {name} parity {parity} state {state}", flush=True
        )


def tensor_map(x, box_rows):
    """Map of a tensor for copies of boxes of 64 channels and `box_rows` rows, as a kernel argument."""
    st = [2 * v for v in x.stride()]
    if x.dim() == 3:
        T, H, D = x.shape
        axes = [(D, 2), (END, st[0]), (H, st[1]), (T + 1, st[0]), (END + 1, (1 << 34) - st[0])]
    else:
        B, S, H, D = x.shape
        axes = [
            (D, 2),
            (S, st[1] if S > 1 else 16),
            (H, st[2] if H > 1 else 16),
            (B, st[0] if B > 1 else 16),
            (1, 16),
        ]
    U64, U32 = driver.cuuint64_t, driver.cuuint32_t
    err, tm = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        5,
        x.data_ptr(),
        [U64(a) for a, _ in axes],
        [U64(b) for _, b in axes[1:]],
        [U32(b) for b in (64, box_rows, 1, 1, 1)],
        [U32(1)] * 5,
        driver.CUtensorMapInterleave(0),
        driver.CUtensorMapSwizzle(3),
        driver.CUtensorMapL2promotion(3),
        driver.CUtensorMapFloatOOBfill(0),
    )
    if int(err):
        raise RuntimeError(f"cuTensorMapEncodeTiled: {err} for a tensor of shape {tuple(x.shape)}")
    return np.frombuffer(np.array([int(w) for w in tm.opaque], np.uint64).tobytes(), "V128")[0]


def loaded(cubin, *names):
    """A module from the bytes of a cubin, and its kernels."""
    mod = cupy.cuda.function.Module()
    mod.load(cubin)
    return mod, *[mod.get_function(n) for n in names]


class Variant:
    """One build of the kernel, with its `prepare` and `finish`."""

    def __init__(self, name, macros, cubin, ends):
        self.name, self.m = name, macros
        self.mod, self.f = loaded(cubin, "attend_backward")
        self.ends, self.first, self.last = ends
        d = macros["HEAD_DIM"]
        self.block_m = bm = macros.get("BLOCK_M", 128 if d == 64 else 64)
        blocks = -(-d // 64)
        self.smem = (
            1024 + blocks * 128 * (2 * 128 + (macros.get("Q_STAGES", 3) + 2) * bm) + 2 * 128 * 2 * bm + 32768
        )
        cupy.cuda.driver.funcSetAttribute(self.f.ptr, 8, self.smem)
        self.semaphore = torch.zeros(1, dtype=torch.int32, device="cuda")

    def prepare(
        self,
        dout,
        q,
        k,
        v,
        out,
        lse,
        causal,
        lengths=None,
        window=(-1, -1),
        section=1 << 50,
        ordered=0,
        descending=None,
    ):
        """Return a function that launches this call; its buffers live as long as the function."""
        D, H, HK = q.shape[-1], q.shape[-2], k.shape[-2]
        left, right = (FAR if w < 0 else w for w in window)
        if causal:
            right = 0
        varlen = lengths is not None
        ql, kl = lengths if varlen else ([q.shape[1]] * q.shape[0], [k.shape[1]] * q.shape[0])
        tiles, _ = tile_list(
            ql, kl, HK, H // HK, self.m["HEAD_DIM"], left, right, varlen, self.block_m, section, ordered
        )
        aligned = -(-max(ql) // 128) * 128
        rows = (sum(ql) // 128 + len(ql)) * 128 if varlen else len(ql) * aligned
        dev = {"device": "cuda"}
        t = torch.from_numpy(tiles).to(**dev)
        cu = torch.tensor([0, *np.cumsum(ql)], dtype=torch.int32, **dev) if varlen else None
        dq, dk, dv = (torch.full(x.shape, float("nan"), dtype=x.dtype, **dev) for x in (q, k, v))
        stats = torch.empty(2 * H * rows, **dev)
        sums = torch.empty(H * rows * self.m["HEAD_DIM"], **dev)
        turns = torch.empty(H * rows // 32 + 8, dtype=torch.int32, **dev)

        def tensor(x):
            return (x.data_ptr(), 0 if varlen else x.stride(0), x.stride(-3), x.stride(-2))

        call = struct.pack(
            "<12q8q3q8ifiq",
            *tensor(dout),
            *tensor(out),
            *tensor(dq),
            lse.data_ptr(),
            stats.data_ptr(),
            stats.data_ptr() + 4 * H * rows,
            sums.data_ptr(),
            turns.data_ptr(),
            t.data_ptr(),
            self.semaphore.data_ptr(),
            cu.data_ptr() if varlen else 0,
            0 if varlen else H * q.shape[1],
            lse.shape[-1],
            rows,
            len(tiles),
            H // HK,
            D,
            left,
            right,
            ordered,
            ordered if descending is None else descending,
            0 if varlen else q.shape[1],
            1 / math.sqrt(D),
            0,
            RECORDS.data_ptr(),
        )
        arg = np.frombuffer(call, f"V{len(call)}")[0]
        maps = [
            tensor_map(q, self.block_m),
            tensor_map(k, 128),
            tensor_map(v, 128),
            tensor_map(dout, self.block_m),
            tensor_map(dk, 64),
            tensor_map(dv, 64),
        ]
        ends = (aligned // 32, H, len(ql))
        grid = (min(len(tiles), SMS),)
        keep = (t, cu, stats, sums, turns, dout, q, k, v, out, lse)

        def launch(part=0):
            st = cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream)
            if part in (0, 1):
                self.first(ends, (256,), (arg,), 0, st)
            if part in (0, 2):
                self.f(grid, (384,), (*maps, arg), self.smem, st)
            if part in (0, 3):
                self.last(ends, (256,), (arg,), 0, st)
            return keep and (dq, dk, dv)

        launch.grads = (dq, dk, dv)
        return launch
