#!/usr/bin/env bash
# Makes sure that there is a nats-server for the tests of log shipping. Run by `make test`; takes no time when there is one.
#
# Never fails: without a server those tests are skipped, and say so.
set -euo pipefail

say() { echo "nats-server: $*" >&2; }

# Where Debian puts it is not on everybody's PATH.
export PATH=$PATH:/usr/sbin:/usr/local/sbin
if command -v nats-server >/dev/null; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    say "not found; the tests of log shipping will be skipped. Install it (Debian, Ubuntu: apt-get install nats-server)"
    exit 0
fi
say "not found; installing it with apt-get for the tests of log shipping"
export DEBIAN_FRONTEND=noninteractive
# policy-rc.d: the package would start a server of its own, which nobody asked for.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
if { apt-get install -y -qq nats-server || { apt-get update -qq && apt-get install -y -qq nats-server; }; } >/dev/null 2>&1; then
    say "installed $(nats-server --version)"
else
    say "apt-get could not install it; the tests of log shipping will be skipped"
fi
