#!/bin/sh
# Builds csrc/*.c and every test_*.c in a temporary directory and runs the tests: run.sh [plain|asan|tsan|aarch64|macos]
# asan: AddressSanitizer and UndefinedBehaviorSanitizer. tsan: ThreadSanitizer, with a tenth of the random problems.
# aarch64 is built with a cross compiler and run by an emulator, on a processor without bf16 and on one with all there
# is; it needs Debian's gcc-aarch64-linux-gnu and qemu-user. macos is compiled and linked alone, by the clang in PyPI's
# ziglang.
set -eu
mode=${1:-plain}
flags="-O3" bf16="-march=armv8.2-a+bf16"
machine=$(uname -m)
case $mode in
  plain) ;;
  asan) flags="-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer" ;;
  tsan) flags="-O1 -g -fsanitize=thread"; export KVEVICT_TEST_ROUNDS="${KVEVICT_TEST_ROUNDS:-9}" ;;
  aarch64) flags="-O3 -static" machine=aarch64 CC=${CC:-aarch64-linux-gnu-gcc} ;;
  macos) machine=arm64 CC=${CC:-python -m ziglang cc -target aarch64-macos} bf16="-mcpu=generic+v8_2a+bf16" ;;
  *) echo "usage: $0 [plain|asan|tsan|aarch64|macos]" >&2; exit 2 ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
csrc=$here/../../csrc
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
compile() { ${CC:-gcc} -std=c11 -fno-math-errno -Wall -Wextra -Wpedantic -Werror $flags "$@"; }
for_isa() {
  isa=$1
  shift
  compile -DKV_ISA="$isa" "$@" -c "$source" -o "$out/$name.$isa.o"
}

all() { # waits for the jobs, and fails where one did
  failed=0
  for job in $jobs; do wait "$job" || failed=1; done
  jobs=
  return $failed
}
kernels() { # one source for every instruction set that it has
  source=$1 name=$(basename "$1" .c)
  case $name:$machine in
    *_cpu:x86_64)
      avx512="-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c -mprefer-vector-width=512"
      for_isa scalar
      for_isa avx2 -mavx2 -mfma -mf16c
      for_isa avx512 $avx512
      for_isa avx512bf16 $avx512 -mavx512bf16
      for_isa amxbf16 $avx512 -mavx512bf16 -mamx-tile -mamx-bf16
      ;;
    *_cpu:aarch64 | *_cpu:arm64)
      for_isa neon
      for_isa neonbf16 $bf16
      ;;
    *_cpu:*) for_isa scalar ;;
    *) compile -c "$source" -o "$out/$name.o" ;;
  esac
}
check() {
  compile -I "$csrc" "$1" "$out"/*.o -lm -lpthread -o "$2"
  case $mode in
    macos) echo "$(basename "$1") links" ;;
    aarch64)
      KVEVICT_TEST_ISA=neonbf16 qemu-aarch64 -cpu max "$2" >"$2.bf16" 2>&1 &
      echo "on a Cortex-A72:" && qemu-aarch64 -cpu cortex-a72 "$2"
      wait $! || bf16_failed=1
      echo "on one with bf16:" && cat "$2.bf16"
      [ -z "${bf16_failed:-}" ]
      ;;
    *) "$2" ;;
  esac
}

jobs=
for source in "$csrc"/*.c; do
  (set -e; kernels "$source") &
  jobs="$jobs $!"
done
all
for test in "$here"/test_*.c; do
  (set -e; check "$test" "$out/$(basename "$test" .c)") >"$out/$(basename "$test" .c).log" 2>&1 &
  jobs="$jobs $!"
done
all || failed=1
cat "$out"/*.log
exit $failed
