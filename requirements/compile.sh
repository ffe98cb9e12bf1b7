#!/usr/bin/env bash
# Recompiles lock.txt from requirements.in and overrides.txt with uv, which lives in a throwaway environment.
#
# Package sources come from the caller's own configuration only (UV_INDEX, UV_FIND_LINKS; PIP_* for uv itself):
# none is written into the lock. Pins already in lock.txt are kept where they still fit; UPGRADE=1 looks for newest versions.
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

echo "lock: installing uv into a throwaway environment"
"$python" -m venv "$scratch/environment"
"$scratch/environment/bin/python" -m pip install --quiet uv 2> >(grep -v "^WARNING: Location .* is ignored" >&2)

# Work on a copy, so that a failed run leaves the lock as it was. torch is left out of the pins that are kept: the lock
# names it without the label of its CPU build, which uv would take for the CUDA build.
grep -v '^torch==' lock.txt > "$scratch/lock.txt" || true
echo "lock: compiling requirements.in"
"$scratch/environment/bin/uv" pip compile requirements.in \
    --override overrides.txt \
    --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
    --no-emit-index-url --no-emit-find-links \
    --custom-compile-command "make lock" \
    ${UPGRADE:+--upgrade} \
    --quiet --output-file "$scratch/lock.txt"

if grep -qE '^(nvidia|cuda)-' "$scratch/lock.txt"; then
    echo "lock: the configured package sources have only torch's CUDA build, whose NVIDIA libraries do not belong in the" >&2
    echo "lock; it is unchanged. Name a source of CPU builds in UV_INDEX or UV_FIND_LINKS, or set UV_TORCH_BACKEND=cpu." >&2
    exit 1
fi

# A local version label such as +cpu would bind the lock to the one package source that uses it.
sed -E 's/^(torch==[0-9.]+)\+[a-z0-9]+/\1/' "$scratch/lock.txt" > lock.txt
echo "lock: $(grep -c '==' lock.txt) packages in requirements/lock.txt"
