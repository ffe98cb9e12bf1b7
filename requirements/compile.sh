#!/usr/bin/env bash
# Recompiles lock.txt from requirements.in and overrides.txt with uv, which lives in a throwaway environment. Each other
# NAME.in becomes NAME.txt, and torch-cuda.txt names what torch's CUDA build needs on top of the lock.
#
# Each package gets the hashes of all its files on the package sources, so that other platforms and Pythons install
# from the same lock. A version that is locked already is kept where it still fits, and so are its hashes: the sources
# of this run need not have every file. UPGRADE=1 looks for newest versions.
#
# Package sources come from the caller's own configuration only (UV_INDEX, UV_DEFAULT_INDEX, UV_FIND_LINKS; PIP_* for uv
# itself): none is written into a lock.
set -euo pipefail
cd "$(dirname "$0")"

python=${PYTHON:-python3}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

echo "lock: installing uv into a throwaway environment"
"$python" -m venv "$scratch/environment"
"$scratch/environment/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes -r uv.txt \
    2> >(grep -v "^WARNING: Location .* is ignored" >&2)

# compile INPUT NAME [OPTION...]: writes $scratch/NAME, and starts from what is there.
compile() {
    "$scratch/environment/bin/uv" pip compile "$1" --generate-hashes \
        --python-version 3.11 --python-platform x86_64-manylinux_2_28 \
        --no-emit-index-url --no-emit-find-links \
        --custom-compile-command "make lock" \
        ${UPGRADE:+--upgrade} \
        --quiet --output-file "$scratch/$2" "${@:3}"
}

# select_torch LOCK, leave_out_torch LOCK: what it says of torch, or of all other packages.
select_torch() { awk '/^[^ #]/ { torch = /^torch==/ } torch' "$1"; }
leave_out_torch() { awk '/^[^ #]/ { torch = /^torch==/ } !torch' "$1"; }

# Work on copies, so that a failed run leaves the locks as they were. torch is left out of the pins that are kept: the
# lock names it without the label of its CPU build, which uv would take for the CUDA build.
leave_out_torch lock.txt > "$scratch/lock.txt"
echo "lock: compiling requirements.in"
compile requirements.in lock.txt --override overrides.txt

if grep -qE '^(nvidia|cuda)-' "$scratch/lock.txt"; then
    echo "lock: the configured package sources have only torch's CUDA build, whose NVIDIA libraries do not belong in the" >&2
    echo "lock; it is unchanged. Name a source of CPU builds in UV_INDEX or UV_FIND_LINKS, or set UV_TORCH_BACKEND=cpu." >&2
    exit 1
fi

# Where no CPU build is configured, `make setup` takes the CUDA build from the default index, and its NVIDIA libraries.
label=$(sed -nE 's/^torch==[0-9.]+(\+[a-z0-9]+)?.*/\1/p' "$scratch/lock.txt") # of the CPU build, mostly +cpu
# A local version label would bind the lock to the one package source that uses it.
sed -i -E 's/^(torch==[0-9.]+)\+[a-z0-9]+/\1/' "$scratch/lock.txt"
torch=$(grep -oE '^torch==[0-9.]+' "$scratch/lock.txt")
echo "lock: compiling what the CUDA build of $torch needs"
{ echo "$torch"; [ -z "$label" ] || echo "${torch/==/!=}$label"; } > "$scratch/torch.in"
leave_out_torch "$scratch/lock.txt" > "$scratch/constraints.txt"
grep -v '^torch==' overrides.txt > "$scratch/overrides.txt"
cp torch-cuda.txt "$scratch"
if ! (
    unset UV_TORCH_BACKEND UV_INDEX UV_EXTRA_INDEX_URL UV_FIND_LINKS
    compile "$scratch/torch.in" torch-cuda.txt --no-annotate \
        --constraint "$scratch/constraints.txt" --override "$scratch/overrides.txt"
); then
    echo "lock: the default package index has no CUDA build of $torch, for the reason above. Its hashes belong in the" >&2
    echo "lock; it is unchanged. Name an index that has it in UV_DEFAULT_INDEX." >&2
    exit 1
fi

# Either build satisfies the lock: it has the hashes of both, and those it had before, from whichever source.
hashes=$(for lock in lock.txt "$scratch/lock.txt" "$scratch/torch-cuda.txt"; do
    ! grep -q "^$torch " "$lock" || select_torch "$lock" | grep -o 'sha256:[0-9a-f]*'
done | sort -u)
awk -v hashes="$hashes" '
    /^[^ #]/ { torch = /^torch==/ }
    torch && /^    --hash=/ { next }
    { print }
    /^torch==/ {
        count = split(hashes, each, "\n")
        for (i = 1; i <= count; i++) print "    --hash=" each[i] (i < count ? " \\" : "")
    }' "$scratch/lock.txt" > "$scratch/joined.txt"
awk '
    /^[^ #]/ { split($1, parts, "=="); known = FNR < NR && parts[1] in locked; locked[parts[1]] }
    FNR < NR && !known' "$scratch/joined.txt" "$scratch/torch-cuda.txt" > "$scratch/rest.txt"

locks=()
for list in *.in; do
    [ "$list" != requirements.in ] || continue
    lock=${list%.in}.txt
    locks+=("$lock")
    echo "lock: compiling $list"
    [ ! -e "$lock" ] || cp "$lock" "$scratch"
    compile "$list" "$lock" --no-deps
done

mv "$scratch/joined.txt" lock.txt
mv "$scratch/rest.txt" torch-cuda.txt
for lock in "${locks[@]}"; do
    mv "$scratch/$lock" .
done
echo "lock: $(grep -c '==' lock.txt) packages in requirements/lock.txt"
