#!/bin/sh
# Builds csrc/*.c and every test_*.c in a temporary directory and runs the tests: run.sh [plain|asan]
set -eu
mode=${1:-plain}
case $mode in
  plain) flags="-O3" ;;
  asan) flags="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer" ;;
  *) echo "usage: $0 [plain|asan]" >&2; exit 2 ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
csrc=$here/../../csrc
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
compile() { "${CC:-gcc}" -std=c11 -fno-math-errno -Wall -Wextra -Wpedantic -Werror $flags "$@"; }

for source in "$csrc"/*.c; do
  name=$(basename "$source" .c)
  case $name in
    *_cpu)
      compile -DKV_ISA=scalar -c "$source" -o "$out/$name.scalar.o"
      if [ "$(uname -m)" = x86_64 ]; then
        compile -DKV_ISA=avx2 -mavx2 -mfma -mf16c -c "$source" -o "$out/$name.avx2.o"
        avx512="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512"
        compile -DKV_ISA=avx512 $avx512 -c "$source" -o "$out/$name.avx512.o"
        compile -DKV_ISA=avx512bf16 $avx512 -mavx512bf16 -c "$source" -o "$out/$name.avx512bf16.o"
      fi
      ;;
    *) compile -c "$source" -o "$out/$name.o" ;;
  esac
done
for test in "$here"/test_*.c; do
  compile -I "$csrc" "$test" "$out"/*.o -lm -lpthread -o "$out/test"
  "$out/test"
done
