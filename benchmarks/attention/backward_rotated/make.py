"""Compile all builds of the experimental backward for Hopper; needs no GPU.

    python make.py BUILD [NAME ...]

BUILD is the folder that exp.py takes; with names only these builds are compiled, to see their registers.
"""

import argparse
import hashlib
import json
import shutil
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from variants import PLAN, VARIANTS

from kvlab.jit.build import build, kernel_root
from kvlab.jit.cubin import read_resources

_HERE = Path(__file__).parent


def compiled(item):
    """Name, macros, cubin and resources of one build; its headers are those of kernels/cuda/common."""
    name, source, macros = item
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        shutil.copytree(kernel_root() / "common", root / "common")
        for path in [*_HERE.glob("*.cu"), *_HERE.glob("*.cuh")]:
            shutil.copy(path, root)
        cubin = build(source, {"BF16": 1, **macros}, "sm_90a", root=root).cubin
    used = {k: (v.registers, v.local_bytes, v.shared_bytes) for k, v in read_resources(cubin).items()}
    return name, macros, cubin, used


def main():
    """Compile and write cubins, manifest.json and plan.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("build", type=Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    arguments.build.mkdir(parents=True, exist_ok=True)
    work = [(f"ends{d}", "ends", {"HEAD_DIM": d}) for d in (64, 96, 128)]
    work += [(name, "backward", macros) for name, macros in VARIANTS.items()]
    manifest = {}
    with ProcessPoolExecutor(2) as pool:
        for name, macros, cubin, used in pool.map(
            compiled, [w for w in work if not arguments.names or w[0] in arguments.names]
        ):
            file = hashlib.sha256(cubin).hexdigest()[:12] + ".cubin"
            (arguments.build / file).write_bytes(cubin)
            manifest[name] = (macros, file)
            print(name, used, flush=True)
    if not arguments.names:
        plan = [
            {**case, "variants": [v if isinstance(v, list) else [v, {}] for v in case["variants"]]}
            for case in PLAN
        ]
        (arguments.build / "manifest.json").write_text(json.dumps(manifest))
        (arguments.build / "plan.json").write_text(json.dumps(plan))


if __name__ == "__main__":
    main()
