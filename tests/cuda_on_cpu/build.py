"""Compiles CUDA kernels for a CPU: with g++ and the emulator beside this file.

    python build.py MODE FOLDER     FOLDER/kvevict: the package, with the CUDA kernels instead of the CPU's

plain   optimised; uninitialised local variables hold a pattern
asan    stops at accesses out of bounds, misaligned accesses and undefined behaviour
race    stops at two accesses to the same memory that no barrier orders (race.cpp)
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CSRC = ROOT / "csrc"
EMULATOR = [HERE / name for name in ("emulator.cpp", "tensor.cpp", "hopper.cpp", "race.cpp")]

SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
# Flags for the kernels, for the emulator, and for linking.
MODES = {
    "plain": (["-O2", "-ftrivial-auto-var-init=pattern"], ["-O2"], []),
    "asan": (["-O1", *SANITIZERS], ["-O1", *SANITIZERS], SANITIZERS),
    "race": (["-O1", "-fsanitize=thread"], ["-O2"], []),
}
CXX = shlex.split(os.environ.get("CXX", "g++"))
COMMON = [*CXX, "-std=c++17", "-g", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden"]
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
KERNEL = [*COMMON, *WARNINGS, "-I", str(HERE), "-include", str(HERE / "ptx.h"), "-x", "c++"]


def run(command):
    subprocess.run([str(part) for part in command], check=True)


def compile_all(mode, sources, folder, csrc=CSRC):
    """The objects of the emulator and of `sources`, .cu files; an object that exists in the folder is used again."""
    kernels, emulator, _ = MODES[mode]
    commands, objects = [], []
    for source in [*EMULATOR, *map(Path, sources)]:
        flags = emulator if source in EMULATOR else kernels
        objects.append(folder / f"{source.name}.o")
        if not objects[-1].exists():
            commands.append([*KERNEL, "-I", csrc, *flags, "-c", source, "-o", objects[-1]])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
    return objects


def build_program(mode, source, folder):
    """folder/<stem of source>, a program."""
    target = folder / Path(source).stem
    run([*CXX, *MODES[mode][2], *compile_all(mode, [source], folder), "-ldl", "-o", target])
    return target


def build_package(mode, folder, csrc=CSRC):
    """folder/kvevict: links to the package's files, and an extension with the kernels of csrc."""
    import torch

    package, site = folder / "kvevict", Path(torch.__file__).parent
    package.mkdir(parents=True)
    for file in (ROOT / "kvevict").iterdir():
        if not file.name.startswith(("_C.", "__pycache__")):
            (package / file.name).symlink_to(file)
    binding, check = folder / "binding.o", folder / "check.o"
    torch_flags = ["-isystem", site / "include", "-isystem", sysconfig.get_path("include")]
    torch_flags += ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-DPy_LIMITED_API=0x030A0000", "-DKVEVICT_ON_CPU"]
    if not binding.exists():
        run([*COMMON, "-std=c++20", "-O1", *torch_flags, "-c", CSRC / "binding.cpp", "-o", binding])
        run(["cc", "-std=c11", "-fPIC", "-O1", "-c", CSRC / "check.c", "-o", check])
    objects = compile_all(mode, [HERE / "ops.cpp", *sorted(csrc.glob("*.cu"))], folder, csrc)
    link = [f"-L{site / 'lib'}", "-ltorch_cpu", "-ldl", "-lm"]
    run([*CXX, "-shared", *MODES[mode][2], binding, check, *objects, *link, "-o", package / "_C.abi3.so"])


if __name__ == "__main__":
    build_package(sys.argv[1], Path(sys.argv[2]))
