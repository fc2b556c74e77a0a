# Sourced: the package and its tests in a scratch folder that goes when the script ends, the extension built there.
# scratch_build FLAGS: FLAGS are of the compiler for everything, binding.cpp included, beside -O1 -g. Leaves the caller
# in the folder, which is $out.
scratch_build() {
  local root
  root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
  cp -r "$root"/{csrc,kvevict,tests,setup.py,pyproject.toml,README.md,LICENSE} "$out"
  cd "$out"
  CC=gcc CXX="g++ $1" CFLAGS="-O1 -g $1" KVEVICT_CUDA=0 python setup.py -q build_ext --inplace >build.log 2>&1 ||
    { tail -20 build.log >&2; exit 1; }
}
