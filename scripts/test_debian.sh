#!/usr/bin/env bash
# Test a wheel of this tree under Debian's own Open MPI and MPICH, in a fresh Debian 12 without a compiler.
# As root, with mmdebstrap (apt-get install mmdebstrap). The system, 350 MB, stays in build/debian for the next run.
#
#   scripts/test_debian.sh [ARGUMENTS OF PYTEST]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

folder=$PWD/build/debian root=$PWD/build/debian/root
if [[ $(id -u) != 0 ]] || ! command -v mmdebstrap unshare >/dev/null; then
    echo "==> Debian's MPIs: not run, it needs root and Debian's packages mmdebstrap and util-linux" >&2
    exit 0
fi
mkdir -p "$folder"
if [[ ! -e $folder/made ]]; then
    echo "==> $root: Debian 12 with openmpi-bin and mpich"
    rm -rf "$root"
    mmdebstrap --quiet --variant=apt --include=python3-venv,openmpi-bin,mpich,procps bookworm "$root"
    touch "$folder/made"
fi

echo "==> a wheel, and what the tests need"
python=$PWD/.venv/bin/python
rm -rf "$folder/wheels" "$root/src" "$root/venv"
"$python" -m pip wheel --quiet --wheel-dir "$folder/wheels" . --group test
mkdir -p "$root/src"
git ls-files -z tests pyproject.toml | xargs -0 cp --parents --target-directory="$root/src"

# A mount namespace of its own: its /proc, /dev and wheels end with it, however this script ends.
exec unshare --mount --pid --fork --kill-child bash -euo pipefail -c '
    root=$1 wheels=$2
    shift 2
    mount --types proc proc "$root/proc"
    for each in dev sys; do mount --rbind "/$each" "$root/$each"; done
    mkdir -p "$root/wheels"
    mount --bind "$wheels" "$root/wheels"
    exec chroot "$root" /bin/sh -euc "
        ! command -v cc gcc clang
        python3 -m venv /venv
        /venv/bin/pip install --quiet --no-index --no-compile /wheels/*.whl
        cd /src
        exec env PATH=/venv/bin:\$PATH pytest -q --full -p no:cacheprovider tests/mpi/test_debians_mpis.py \"\$@\"
    " sh "$@"
' bash "$root" "$folder/wheels" "$@"
