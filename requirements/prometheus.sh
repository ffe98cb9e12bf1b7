#!/usr/bin/env bash
# Makes sure that there are a Prometheus and a promtool for the tests of metrics and alerts. Run by `make test`; takes no
# time when they are there. Never fails: without them those tests are skipped, and say so.
set -euo pipefail

say() { echo "prometheus: $*" >&2; }

if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    say "not found; the tests of alerts will be skipped. Install it (Debian, Ubuntu: apt-get install prometheus)"
    exit 0
fi
say "not found; installing it with apt-get for the tests of alerts (about 100 MB, once)"
export DEBIAN_FRONTEND=noninteractive
# policy-rc.d: the package would start a server of its own, which nobody asked for.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
install() { apt-get install -y -qq --no-install-recommends prometheus; }
if { install || { apt-get update -qq && install; }; } >/dev/null 2>&1; then
    say "installed $(prometheus --version 2>&1 | head -n 1)"
else
    say "apt-get could not install it; the tests of alerts will be skipped"
fi
