#!/usr/bin/env bash
# ./gpu-test.sh WORD [target] [options]: the same as `kvlab WORD ...` with this checkout's environment, for
# WORD one of test, benchmark, profile, validate and clean; `./gpu-test.sh` alone validates.
set -euo pipefail
cd "$(dirname "$0")"
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
case "${1:-validate}" in
test | benchmark | profile | validate | clean) ;;
*)
    echo "gpu-test.sh: '$1' is not one of test, benchmark, profile, validate, clean" >&2
    exit 2
    ;;
esac
exec "$python" -m kvlab.cli "${@:-validate}"
