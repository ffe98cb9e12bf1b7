#!/usr/bin/env bash
# Makes .venv-NAME: what .venv has, and in front of it what NAME.txt names. For what cannot stand in one environment with
# .venv: another version of vLLM, or packages whose own lists contradict vLLM's. So only what is seen to be needed on a CPU
# is installed, without what it asks for, and with the hashes of that lock. Run by `make lmcache` and `make vllm-next`; no time if done.
set -euo pipefail
cd "$(dirname "$0")/.."

name=$1
venv=$PWD/.venv-$name
stamp=$(sha256sum "requirements/$name.txt" requirements/lock.txt | sha256sum)
if [ "$(cat "$venv/stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
echo "$name: creating .venv-$name from requirements/$name.txt"
rm -rf "$venv"
.venv/bin/python -m venv --without-pip "$venv"
packages() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
echo "import site; site.addsitedir('$(packages .venv/bin/python)')" > "$(packages "$venv/bin/python")/kvledger.pth"
.venv/bin/python -m pip --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-deps \
    --no-build-isolation --require-hashes -r "requirements/$name.txt" 2> >(grep -v "^WARNING: Location .* is ignored" >&2)
echo "$stamp" > "$venv/stamp"
