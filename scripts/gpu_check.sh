#!/usr/bin/env bash
# Check the GPU path on this machine's GPU, in at most 8 minutes and without a network: see docs/gpu.md.
#
#   scripts/gpu_check.sh            the check; results in $OUT, or build/gpu-check
#   scripts/gpu_check.sh --fetch    get the wheels that it needs, where there is a network
#   scripts/gpu_check.sh --fakes    the same stages on the tests' fakes, in the environment of $PYTHON
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}

if [[ ${1:-} == --fetch ]]; then
    exec "$python" -m pip download --quiet --only-binary :all: --no-deps --dest wheels \
        'setuptools>=77' 'Cython>=3.1,<4' 'mpi4py>=4.1' 'mpich>=4.3' msgspec cloudpickle ml_dtypes \
        pytest pytest-timeout pluggy iniconfig packaging pygments hypothesis sortedcontainers
fi
exec "$python" scripts/gpu_check.py --out "${OUT:-build/gpu-check}" "$@"
