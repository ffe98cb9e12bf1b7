#!/usr/bin/env bash
# Makes sure that there is a program that some tests run: `debian.sh PROGRAM TESTS`, where Debian's package has the
# program's name. Run by `make test`; takes no time when it is there.
#
# Never fails: without the program those tests are skipped, and say so.
set -euo pipefail

program=$1
tests=$2
say() { echo "$program: $*" >&2; }

# Where Debian puts it is not on everybody's PATH.
export PATH=$PATH:/usr/sbin:/usr/local/sbin
if command -v "$program" >/dev/null; then
    exit 0
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    say "not found; the tests of $tests will be skipped. Install it (Debian, Ubuntu: apt-get install $program)"
    exit 0
fi
say "not found; installing it with apt-get for the tests of $tests (once)"
export DEBIAN_FRONTEND=noninteractive
# policy-rc.d: the package of a server would start one, which nobody asked for.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod +x "$policy"
    trap 'rm -f "$policy"' EXIT
fi
install() { apt-get install -y -qq --no-install-recommends "$program"; }
if { install || { apt-get update -qq && install; }; } >/dev/null 2>&1; then
    say "installed $("$program" --version 2>&1 | head -n 1)"
else
    say "apt-get could not install it; the tests of $tests will be skipped"
fi
