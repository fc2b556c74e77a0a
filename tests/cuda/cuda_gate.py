"""Compiles every CUDA kernel for every supported GPU and checks it against its file's budget. Needs nvcc, no GPU.

    python tests/cuda/cuda_gate.py [--archs 80,90] [--counts 80] [attend select ...]

A warning, local memory (spilled registers, or an array that is not in registers), static shared memory, wgmma that
ptxas makes wait for one another, or more registers than the file's line "budget: regs N, smem BYTES" states is an
error. tests/cuda_on_cpu/run.sh checks BYTES, the most dynamic shared memory of a block, against the launches. Files
*_sm90.cu are compiled for sm_90a alone. Prints a table of the kernels and, with nvdisasm on PATH
(`pip install nvidia-cuda-nvdisasm`), the machine instructions of each one's main loops: those that multiply matrices,
or the one with the most arithmetic. With g++, for decode and attend also the blocks of a decoded token and of short
queries on 32,768 slots (launches.cpp), and how often they fill a GPU; fewer blocks than it has multiprocessors are an
error.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shutil import which

CSRC = Path(__file__).resolve().parents[2] / "csrc"
ARCHS = ["80", "86", "89", "90", "100", "120"]
HERE = Path(__file__).resolve().parent
# By architecture: a GPU's name, its multiprocessors and the KiB of shared memory of each.
GPUS = {"80": ("A100", 108, 164), "90": ("H100", 132, 228), "120": ("RTX 5090", 170, 100)}
MOST_SHARED = 101376  # the limit of a block on sm_86, sm_89 and sm_120
MOST_SHARED_SM90 = 232448

# Columns of the instruction table; an instruction counts where its name first matches.
KINDS = {
    "mma": r"HMMA", "wgmma": r"HGMMA", "ldmatrix": r"LDSM|MOVM", "cp.async": r"LDGSTS",
    "fma": r"FFMA|FADD|FMUL", "mufu": r"MUFU",
    "global": r"LDG|STG|LD\.|ST\.|ATOMG|RED", "shared": r"LDS|STS|ATOMS", "local": r"LDL|STL", "shuffle": r"SHFL",
    "barrier": r"BAR|LDGDEPBAR|DEPBAR|SYNCS|WARPGROUP",
}  # fmt: skip


# An address, an optional predicate, and the operation.
INSTRUCTION = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z].*?) ?;"


def budget_of(source):
    found = re.search(r"budget: regs (\d+), smem (\d+)", source.read_text())
    return {"regs": int(found[1]), "smem": int(found[2])} if found else None


def for_sm90(source):
    return source.stem.endswith("_sm90")


def op_of(source):
    return re.sub("_cuda$|_sm90$", "", source.stem)


def compile_one(source, arch, folder):
    """ptxas' report on `source` for one GPU, and the path of the machine code."""
    cubin = folder / f"{source.stem}.{arch}.cubin"
    target = f"arch=compute_{arch},code=sm_{arch}"
    command = ["nvcc", "-std=c++17", "-O3", "-cubin", "-gencode", target, "-Xptxas", "-v,-Werror"]
    command += ["-Werror", "all-warnings", str(source), "-o", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr, cubin


def demangled(names):
    text = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    text = text.replace("(anonymous namespace)::", "")
    return [re.sub(r"^void |\(.*\)$|\b\(\w+\)(?=\d)", "", line) for line in text.splitlines()]


def kernels_in(report):
    """{mangled name: {regs, spilled, smem}} from ptxas -v."""
    kernels, name = {}, None
    for line in report.splitlines():
        if found := re.search(r"Compiling entry function '(\w+)'", line):
            name = found[1]
            kernels[name] = {"regs": 0, "spilled": 0, "stack": 0, "smem": 0}
        elif found := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            kernels[name]["stack"] = max(kernels[name]["stack"], int(found[1]))
            kernels[name]["spilled"] = max(kernels[name]["spilled"], int(found[2]) + int(found[3]))
        elif found := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[name].update(regs=int(found[1]), smem=int(shared[1]) if shared else 0)
    return kernels


def faults(source, arch, kernels):
    budget = budget_of(source)
    if budget is None:
        if kernels:
            yield f"{source.name} has no line 'budget: regs N, smem BYTES'"
        return
    most = MOST_SHARED_SM90 if for_sm90(source) else MOST_SHARED
    if budget["smem"] > most:
        yield f"{source.name} wants {budget['smem']} bytes of shared memory, no more than {most} are everywhere"
    for name, used in zip(demangled(kernels), kernels.values()):
        if used["spilled"]:
            yield f"sm_{arch} {source.name} {name}: {used['spilled']} bytes of registers spilled"
        if used["stack"]:
            yield f"sm_{arch} {source.name} {name}: {used['stack']} bytes of stack; are all array indices constants?"
        if used["regs"] > budget["regs"]:
            yield f"sm_{arch} {source.name} {name}: {used['regs']} registers, the budget is {budget['regs']}"
        if used["smem"]:
            yield f"sm_{arch} {source.name} {name}: {used['smem']} bytes of static shared memory; it is to be dynamic"


def code_of(cubin):
    """{mangled name: [instruction or label]}"""
    text = subprocess.run(["nvdisasm", "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    code = {}
    for line in text.splitlines():
        if found := re.match(r"\.text\.(\w+):", line):
            lines = code[found[1]] = []
        elif found := re.match(r"(\.L\w+):", line) or re.search(INSTRUCTION, line):
            lines.append(found[1])
    return code


def counted(lines):
    count = Counter(instructions=sum(not line.startswith(".L") for line in lines))
    for line in lines:
        kind = next((kind for kind, pattern in KINDS.items() if re.match(pattern, line)), None)
        count[kind] += kind is not None
    return count


def main_loops(lines):
    """[(nesting, counts)] of the loops around matrix products, outer ones first; without any, of the innermost loop
    with the most arithmetic. An inner loop's instructions are not counted again; instructions that a branch may skip
    are counted."""
    labels = {line: i for i, line in enumerate(lines) if line.startswith(".L")}
    branches = [(labels.get(found[1], len(lines)), i) for i, line in enumerate(lines)
                if (found := re.match(r"BRA.*`\((\.L\w+)\)", line))]  # fmt: skip
    # Rare paths lie after the kernel's end and jump back into it; such a jump is not a loop.
    loops = [(start, end) for start, end in branches if start < end and "EXIT" not in lines[start:end]]
    found = []
    for start, end in sorted(loops, key=lambda loop: (loop[0], -loop[1])):
        inner = [(a, b) for a, b in loops if start <= a and b <= end and (a, b) != (start, end)]
        outer = sum(a <= start and end <= b for a, b in loops) - 1
        own = counted([lines[i] for i in range(start, end + 1) if not any(a <= i <= b for a, b in inner)])
        products = any(re.match("HG?MMA", line) for line in lines[start:end])
        found.append((outer, own, products, not inner))
    around = [(outer, own) for outer, own, products, _ in found if products]
    innermost = [(0, own) for _, own, _, last in found if last]
    return around or sorted(innermost, key=lambda loop: (loop[1]["fma"], loop[1]["instructions"]))[-1:]


def print_table(head, rows):
    width = [max(len(str(row[i])) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        print(f"{row[0]:<{width[0]}}", *(f"{cell:>{w}}" for cell, w in zip(row[1:], width[1:])), sep="  ")
    print()


def print_counts(sources, arch, folder):
    rows = []
    for source in sources:
        code = code_of(folder / f"{source.stem}.{'90a' if for_sm90(source) else arch}.cubin")
        for name, lines in sorted(zip(demangled(code), code.values())):
            head = [name, counted(lines)["instructions"]]
            for outer, loop in main_loops(lines) or [(0, Counter())]:
                rows.append([*head, loop["instructions"], *(loop[kind] for kind in KINDS)])
                head = ["  in it" + "  " * outer, ""]
    print(f"Machine instructions for sm_{arch}: of the kernel, and of its main loops by kind")
    print_table(["kernel", "all", "loop", *KINDS], rows)


def launches(folder):
    """[(shape, kernel, blocks, threads, shared memory of a block)]; the linker finds no emulator, as no kernel runs."""
    emulator, target = HERE.parent / "cuda_on_cpu", folder / "launches"
    sources = [emulator / "launches.cpp", CSRC / "attend_cuda.cu", CSRC / "decode_cuda.cu"]
    command = ["g++", "-std=c++17", "-w", "-DKV_MOST_GRID_Y=65535", f"-I{emulator}", f"-I{CSRC}"]
    command += ["-include", emulator / "ptx.h", "-x", "c++", *sources]
    subprocess.run([*command, "-no-pie", "-Wl,--unresolved-symbols=ignore-all", "-o", target], check=True)
    lines = subprocess.run([target], capture_output=True, text=True, check=True).stdout.splitlines()
    return [(shape, kernel, *map(int, numbers)) for shape, kernel, *numbers in (line.split("; ") for line in lines)]


def print_waves(used, archs, folder):
    """A GPU's wave is as many blocks as run at once."""
    rows, wrong, seen = [], [], ""
    regs = {kernel.replace(" ", ""): regs for (_, kernel), regs in used.items()}
    gpus = [(arch, *GPUS[arch.rstrip("a")]) for arch in archs if arch.rstrip("a") in GPUS]
    for shape, kernel, blocks, threads, shared in launches(folder):
        row = ["" if shape == seen else shape, kernel, blocks, shared]
        for arch, name, units, kib in gpus:
            registers = -(-regs[kernel.replace(" ", "")][arch] // 8) * 8 * threads
            at_once = min(65536 // registers, (kib << 10) // (shared + 1024), 2048 // threads, 32)
            row += [at_once, f"{blocks / (at_once * units):.2f}"]
            if shape != seen and blocks < units:
                wrong.append(f"{shape}: {blocks} blocks for the {units} multiprocessors of {name}")
        rows.append(row)
        seen = shape
    print("bf16, 128 dimensions, 8 kv heads of 32,768 slots: blocks of a launch, on a multiprocessor, and waves")
    heads = [head for _, name, *_ in gpus for head in (name, "waves")]
    print_table(["shape", "kernel", "blocks", "shared", *heads], rows)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", help="all")
    parser.add_argument("--archs", default=",".join(ARCHS))
    parser.add_argument("--counts", default="80", help="for which GPU instructions are counted (80)")
    asked = parser.parse_args()
    archs = asked.archs.split(",")
    sources = sorted([*CSRC.glob("*_cuda.cu"), *CSRC.glob("*_sm90.cu")])
    sources = [s for s in sources if not asked.ops or op_of(s) in asked.ops]
    known = subprocess.run(["nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout.split()
    if unknown := [arch for arch in archs if f"compute_{arch.rstrip('a')}" not in known]:
        sys.exit(f"this nvcc does not know sm_{', sm_'.join(unknown)}")

    with tempfile.TemporaryDirectory() as name:
        folder, wrong = Path(name), []
        jobs = [(source, arch) for source in sources for arch in (["90a"] if for_sm90(source) else archs)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            done = list(pool.map(lambda job: compile_one(*job, folder), jobs))
        used = {}
        for (source, arch), (code, report, _) in zip(jobs, done):
            kernels = kernels_in(report)
            wrong += [f"sm_{arch} {source.name}: nvcc says\n{report}"] if code else faults(source, arch, kernels)
            wrong += [f"sm_{arch} {source.name}: {line}" for line in report.splitlines() if "(C75" in line]  # of wgmma
            for kernel, what in zip(demangled(kernels), kernels.values()):
                used.setdefault((source.stem, kernel), {})[arch] = what["regs"]
        budgets = {source.stem: budget_of(source) or {"regs": "-", "smem": "-"} for source in sources}
        print("Registers of a thread by GPU, and the file's budget with the shared memory of a block")
        shown = list(dict.fromkeys([*archs, *(arch for _, arch in jobs)]))
        rows = [[kernel, *(regs.get(arch, "-") for arch in shown), *budgets[stem].values()]
                for (stem, kernel), regs in sorted(used.items())]  # fmt: skip
        print_table(["kernel", *(f"sm_{arch}" for arch in shown), "regs", "smem"], rows)
        if which("g++") and {"attend", "decode"} <= {*map(op_of, sources)} and not wrong:
            wrong += print_waves(used, archs, folder)
        if which("nvdisasm") and asked.counts in archs and not wrong:
            print_counts(sources, asked.counts, folder)
        elif not which("nvdisasm"):
            print("No nvdisasm on PATH: no instruction counts\n")
    for line in dict.fromkeys(wrong):
        print("WRONG:", line)
    print(f"{len(rows)} kernels for {len(archs)} GPUs, {len(wrong)} faults")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
