"""Compile every variant of candidates.cu to DIR/<name>.cubin for sm_90a; needs NVRTC (cuda-core), no GPU."""

import pathlib
import sys

from cuda.core import Program, ProgramOptions
from variants import VARIANTS, macros, name


def main(folder: str) -> None:
    source = (pathlib.Path(__file__).parent / "candidates.cu").read_text()
    target = pathlib.Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for v in VARIANTS:
        options = ProgramOptions(
            std="c++17", arch="sm_90a", define_macro=[(k, str(x)) for k, x in macros(v).items()]
        )
        (target / f"{name(v)}.cubin").write_bytes(
            bytes(Program(source, "c++", options).compile("cubin").code)
        )
    print(f"{len(VARIANTS)} variants in {target}")


if __name__ == "__main__":
    main(*sys.argv[1:])
