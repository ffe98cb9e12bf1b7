#!/usr/bin/env bash
# Makes .venv-lmcache: what .venv has, and LMCache 0.5.6. An environment of its own, because LMCache's own list of what it
# needs contradicts vLLM's; so only what it is seen to need on a CPU is installed. Run by `make lmcache`; no time if done.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$PWD/.venv-lmcache
stamp=$(sha256sum requirements/lmcache.txt requirements/lock.txt | sha256sum)
if [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
echo "lmcache: creating .venv-lmcache from requirements/lmcache.txt"
rm -rf "$venv"
.venv/bin/python -m venv --without-pip "$venv"
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$packages')" > "$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/kvledger.pth"
.venv/bin/python -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-deps \
    -r requirements/lmcache.txt 2> >(grep -v "^WARNING: Location .* is ignored" >&2)
echo "$stamp" > "$venv/stamp"
