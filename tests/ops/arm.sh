#!/usr/bin/env bash
# The ops' tests of the preset `take` and of packed slots on an emulated ARM: arm.sh [pytest's options]     such as:
# arm.sh -k matches
# The extension is built by setup.py with a cross compiler. Python comes from Debian and what has machine code from
# PyPI, neither installed; packages without lie in this environment. Needs apt-get, qemu-user and Debian's
# g++-aarch64-linux-gnu; exits with 77 where Debian's packages cannot be fetched.
set -euo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

# A Debian of arm64 that knows no other packages than those that it fetches.
mkdir -p "$out"/apt/state/lists/partial "$out"/apt/cache/archives/partial "$out/root"
: >"$out/apt/state/status"
debian() {
  apt-get -q -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$out/apt/state" \
    -o Dir::State::status="$out/apt/state/status" -o Dir::Cache="$out/apt/cache" \
    -o APT::Sandbox::User="$(id -un)" "$@" >>"$out/apt/log" 2>&1
}
packages=(python3.11-minimal libpython3.11-dev libstdc++6 libgomp1)
{ debian update && debian install -y --download-only --no-install-recommends "${packages[@]}"; } || {
  cat "$out/apt/log"
  echo "LEFT OUT: Debian's packages for ARM cannot be fetched"
  exit 77
}
for package in "$out"/apt/cache/archives/*.deb; do dpkg-deb -x "$package" "$out/root"; done

# torch 2.10 is the oldest that kvevict takes, and the last whose wheel for ARM Linux on PyPI needs no CUDA.
compiled=$(python -c 'from importlib.metadata import version as v
for name in "numpy safetensors tokenizers regex pyyaml markupsafe psutil hf-xet".split(): print(f"{name}=={v(name)}")')
# shellcheck disable=SC2086  # a list
pip install -q --no-deps --target "$out/site" --python-version 3.11 --only-binary=:all: \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 torch==2.10.0 $compiled

cp -r "$here"/{setup.py,pyproject.toml,README.md,LICENSE,csrc,kvevict,tests} "$out" # the clone keeps its own binary
rm -f "$out"/kvevict/*.so
cd "$out"
pure=$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
arm() { PYTHONPATH=$out/site:$out:$pure qemu-aarch64 -L root -cpu max root/usr/bin/python3.11 "$@"; }
KVEVICT_CUDA=0 CC=aarch64-linux-gnu-gcc CXX="aarch64-linux-gnu-g++ -idirafter $out/root/usr/include" \
  arm setup.py -q build_ext --inplace >build.log || { cat build.log; exit 1; }
arm -c 'import platform, torch, kvevict.ops._ops as ops
print(platform.machine(), "torch", torch.__version__, ops.build_info(), ops.cpu_isa())'
# hypothesis has machine code of this processor, and these tests do without
arm -m pytest -q -n0 -p no:cacheprovider -p no:hypothesispytest tests/ops/test_{attend,score,select,compact,decode,packed}.py "$@"
