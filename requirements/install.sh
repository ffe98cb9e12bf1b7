#!/usr/bin/env bash
# Makes .venv hold exactly what lock.txt names, and kvledger itself. Run through `make setup`; safe to repeat.
#
# pip installs no downloaded file whose hash the locks do not name (docs/decisions/0052-hashes-in-the-locks.md).
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

# install_locked LOCK ARGUMENT...: installs what the arguments name, with the versions and hashes of a lock.
# --no-deps: a lock is complete, and vLLM's own list would bring in what overrides.txt leaves out.
# --no-build-isolation: otherwise pip downloads what it needs to build a source archive, without asking for hashes.
install_locked() {
    pip_install --no-deps --no-build-isolation --require-hashes "${@:2}" && return
    say "requirements/$1 could not be installed, for the reason above. If a hash differs, somebody may have changed the" >&2
    say "file: compare it with the same file on another package source. To accept what your own sources have, delete the" >&2
    fail "package's hashes from requirements/$1, run \`make lock\`, and then \`make setup\` again."
}

# What the lock says of the packages whose names match.
locked() { awk -v wanted="^$1==" '/^[^ #]/ { matches = $0 ~ wanted } matches' requirements/lock.txt; }

# The lock has the hashes of torch's CPU build and of its CUDA build. By itself pip prefers a file whose hash the package
# source names, so it would leave a CPU build that lies in a folder (PIP_FIND_LINKS) for the CUDA build of an index.
install_cpu_torch_if_there() {
    local log
    log=$(mktemp)
    total=0 pip_install --no-deps --only-binary :all: --require-hashes \
        -r <(locked torch | sed -E 's/^torch==[0-9.]+/&+cpu/') >"$log" 2>&1 ||
        grep -q "No matching distribution found" "$log" ||
        { cat "$log"; say "torch's CPU build was not installed, for the reason above; trying its other builds"; } >&2
    rm -f "$log"
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
    # With these two pip builds the packages that have only a source archive.
    total=0 install_locked lock.txt -r <(locked '(setuptools|wheel)')
    install_cpu_torch_if_there
    install_locked lock.txt -r requirements/lock.txt
    install_torch_libraries_if_missing
    mkdir -p "$stamps"
    echo "$1" > "$stamps/lock"
}

install_torch_libraries_if_missing() {
    "$venv_python" -c 'import torch' 2>/dev/null && return
    say "torch was installed and cannot be imported: the configured package sources have its CUDA build, and no CPU build"
    say "with a hash in requirements/lock.txt. The CUDA build needs NVIDIA libraries: installing them too (several GB)."
    say "To avoid that, let PIP_EXTRA_INDEX_URL and UV_INDEX name PyTorch's index of CPU builds, delete .venv, run"
    say "\`make lock\` unless this is Python 3.11 on Linux, x86-64 (only its CPU build has a hash), and run again."
    total=0 install_locked torch-cuda.txt -r requirements/torch-cuda.txt
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
    local file
    for file in __init__.py py.typed; do
        ln -sfn "$root/adapters/public/$file" "$venv/import-root/kvledger/$file"
    done
    echo "$1" > "$stamps/kvledger"
}

lock_stamp=$(stamp_of requirements/lock.txt)
kvledger_stamp=$(stamp_of pyproject.toml setup.py)
# `pip install .` in .venv puts a copy in the place of the checkout.
compgen -G "$venv/lib/python3*/site-packages/kvledger/lifecycle" > /dev/null && rm -f "$stamps/kvledger"
if stamp_is_current lock "$lock_stamp" && stamp_is_current kvledger "$kvledger_stamp"; then
    exit 0
fi
stamp_is_current lock "$lock_stamp" || install_lock "$lock_stamp"
install_kvledger "$kvledger_stamp"
say "done"
