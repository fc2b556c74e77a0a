"""Builds kvevict._C: C files with the C compiler (kernels once per instruction set), binding.cpp with the C++ compiler,
.cu files with nvcc, all linked into one abi3 extension. torch's BuildExtension is not used: it compiles .c as C++ and
hides nvcc if torch is a CPU build.

  CC, CXX, CFLAGS, CXXFLAGS   as usual
  KVEVICT_CUDA=auto|1|0       build the CUDA kernels if nvcc is found and torch is a CUDA build | always | never  (auto)
  KVEVICT_CUDA_ARCHS=80,90    which GPUs to compile for               (those of CUDA_ARCHS that nvcc knows)
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

CSRC = Path("csrc")
OLDEST_TORCH = (2, 10)
CUDA_ARCHS = ["80", "86", "89", "90", "100", "120"]

# Every <op>_cpu.c is compiled once with each of these; simd.h gives it the vectors of KV_ISA.
ISA_FLAGS = {"scalar": []}
if platform.machine().lower() in ("aarch64", "arm64"):
    ISA_FLAGS = {"neon": [], "neonbf16": ["-march=armv8.2-a+bf16"]}
if platform.machine().lower() in ("x86_64", "amd64"):
    ISA_FLAGS["avx2"] = ["-mavx2", "-mfma", "-mf16c"]
    ISA_FLAGS["avx512"] = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
    ISA_FLAGS["avx512"] += ["-mprefer-vector-width=512"]
    ISA_FLAGS["avx512bf16"] = [*ISA_FLAGS["avx512"], "-mavx512bf16"]
    ISA_FLAGS["amxbf16"] = [*ISA_FLAGS["avx512bf16"], "-mamx-tile", "-mamx-bf16"]

# The limited API makes one binary serve every CPython from 3.10 on; free-threaded builds do not have it.
LIMITED_API = not sysconfig.get_config_var("Py_GIL_DISABLED")


def torch_dir():
    """The folder of the torch that this interpreter imports. pip's build isolation hides the interpreter's packages
    through PYTHONPATH, so a torch that is not found is searched again without PYTHONPATH. Nothing imports torch: only
    its headers and libtorch_cpu are needed, and any version from OLDEST_TORCH on makes the same binary."""
    find = "from importlib.util import find_spec as f; s = f('torch'); print(s.origin if s else '')"
    origin = getattr(find_spec("torch"), "origin", None)
    origin = origin or subprocess.check_output([sys.executable, "-E", "-c", find], text=True).strip()
    if not origin:
        raise SystemExit(
            f"kvevict: no torch in {sys.prefix}, and its headers are needed to build: run `pip install torch` first "
            "(any from 2.10 on; torch==2.13.0 if you have none), then the same command again"
        )
    root = Path(origin).parent
    version = re.search(r"__version__ = '((\d+)\.(\d+)[^']*)'", (root / "version.py").read_text())
    if (int(version[2]), int(version[3])) < OLDEST_TORCH:
        raise SystemExit(f"kvevict: torch {version[1]} is too old: run `pip install 'torch>=2.10'`")
    return root


def find_nvcc(torch):
    """Path of nvcc, or None where no CUDA kernels are to be built: a torch for CPUs alone has no tensors for them."""
    wish = os.environ.get("KVEVICT_CUDA", "auto")
    if wish not in ("auto", "1", "0"):
        raise SystemExit(f"kvevict: KVEVICT_CUDA is {wish!r}, not auto, 1 or 0")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")
    if wish == "1" and not nvcc:
        raise SystemExit("kvevict: KVEVICT_CUDA=1 needs nvcc: put it on PATH or set CUDA_HOME")
    for_cuda = re.search(r"^cuda\b.*= '", (torch / "version.py").read_text(), re.M)
    return nvcc if wish == "1" or (wish == "auto" and for_cuda) else None


def cuda_archs(nvcc):
    if os.environ.get("KVEVICT_CUDA_ARCHS"):
        return os.environ["KVEVICT_CUDA_ARCHS"].replace(";", ",").split(",")
    known = re.findall(r"compute_(\w+)", subprocess.check_output([nvcc, "--list-gpu-arch"], text=True))
    return [arch for arch in CUDA_ARCHS if arch in known]


def gencode(source, archs):
    """nvcc's options for every target. A file with instructions of one architecture is built for that one alone. All
    others are also kept as PTX of the newest architecture, for future GPUs."""
    if source.stem.endswith("_sm90"):
        return ["-gencode=arch=compute_90a,code=sm_90a"]
    ptx = f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"
    return [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs] + [ptx]


def run(command):
    print(shlex.join(map(str, command)), flush=True)
    subprocess.run(command, check=True)


def compile_object(command, target):
    """Compile unless `target` is newer than every file that it was made of, the compiler included, and was made by the
    same command. The compiler writes the list of files beside it (.d), this function the command (.command)."""
    recorded, made_of = target.with_suffix(".command"), target.with_suffix(".d")
    command = [*map(str, command), "-MMD", "-MF", str(made_of), "-o", str(target)]
    compiler = shutil.which(command[0]) or command[0]
    if target.exists() and made_of.exists() and recorded.exists() and recorded.read_text() == shlex.join(command):
        files = [compiler, *made_of.read_text().replace("\\\n", " ").partition(":")[2].split()]
        if all(os.path.exists(file) and os.stat(file).st_mtime <= target.stat().st_mtime for file in files):
            return
    recorded.unlink(missing_ok=True)
    run(command)
    recorded.write_text(shlex.join(command))


class BuildExt(build_ext):
    def build_extension(self, ext):
        torch = torch_dir()
        nvcc = find_nvcc(torch)
        archs = cuda_archs(nvcc) if nvcc else []
        # Kept over builds of every kind, so that an edit recompiles the files that include it.
        folder = Path("build") / f"objects-{sysconfig.get_platform()}"
        folder.mkdir(parents=True, exist_ok=True)
        commands, objects = [], []

        def add(source, compiler, tag=""):
            objects.append(folder / f"{source.stem}{tag}.o")
            commands.append([*compiler, "-c", str(source)])

        def environment(name, default):
            return shlex.split(os.environ.get(name, default))

        shared = ["-O3", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]
        # A square root that sets errno is a call, not an instruction.
        cc = [*environment("CC", "cc"), "-std=c11", "-fno-math-errno", *shared, *environment("CFLAGS", "")]
        for source in sorted(CSRC.glob("*.c")):
            if source.name.endswith("_cpu.c"):
                for isa, flags in ISA_FLAGS.items():
                    add(source, [*cc, f"-DKV_ISA={isa}", *flags], f"_{isa}")
            else:
                add(source, cc)

        # torch's headers are not ours to warn about: -isystem.
        cxx = [*environment("CXX", "c++"), "-std=c++20", *shared, *environment("CXXFLAGS", "")]
        cxx += ["-isystem", str(torch / "include"), "-isystem", sysconfig.get_path("include")]
        cxx += ["-DTORCH_TARGET_VERSION=0x020a000000000000"]
        cxx += ["-DPy_LIMITED_API=0x030A0000"] if LIMITED_API else []
        cxx += [f'-DKVEVICT_CUDA_ARCHS="{",".join(archs)}"'] if nvcc else []
        add(CSRC / "binding.cpp", cxx)

        for source in sorted(CSRC.glob("*.cu")) if nvcc else []:
            host = "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-threadsafe-statics"
            add(source, [nvcc, "-std=c++17", "-O3", "-lineinfo", "-Xcompiler", host, *gencode(source, archs)], "_cu")

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_object, commands, objects))

        target = self.get_ext_fullpath(ext.name)
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        exports = folder / "exports.map"
        exports.write_text("{ global: PyInit__C; local: *; };")
        # nvcc knows where its static cudart is. No rpath: torch, imported first, has loaded libtorch_cpu.
        link = [nvcc, "-shared", "-cudart=static"] if nvcc else [*environment("CXX", "c++"), "-shared"]
        libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-ldl", "-lm", "-Xlinker", f"--version-script={exports}"]
        if sys.platform == "darwin":  # its linker lacks version scripts and does not search loaded libraries
            libraries = ["-undefined", "dynamic_lookup", "-Wl,-exported_symbol,_PyInit__C"]
        run([*link, *map(str, objects), *libraries, "-o", target])
        # Also beside the sources: in a clone, `python -m` finds them before the installed package.
        if not self.inplace:  # a process may be running the old one
            os.replace(shutil.copy(target, "kvevict/_C.new"), f"kvevict/{Path(target).name}")


setup(
    ext_modules=[Extension("kvevict._C", [str(CSRC / "binding.cpp")], py_limited_api=LIMITED_API)],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if LIMITED_API else {},
)
