"""Reads a build log with ptxas -v output and fails when a main kernel spills registers.

The main kernels are those of csrc/attention/sm90, the only ones compiled for sm_90a. wgmma
instructions that ptxas had to serialise are a failure too: such a kernel is several times slower.

    python scripts/check_spills.py build.log [--architecture sm_90a] [--require]
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
PROPERTIES = re.compile(r"Function properties for (\w+)")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SERIALISED = re.compile(r"wgmma.*serializ", re.IGNORECASE)


@dataclass
class Kernel:
    name: str
    architecture: str
    registers: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0


def parse(log: str) -> tuple[list[Kernel], list[str]]:
    """Kernels in the order of the log, and ptxas' complaints about serialised wgmma."""
    kernels: list[Kernel] = []
    complaints = []
    of_entry = False  # a device function of its own gets a properties line, but no registers
    for line in log.splitlines():
        if match := ENTRY.search(line):
            kernels.append(Kernel(match[1], match[2]))
        elif match := PROPERTIES.search(line):
            of_entry = bool(kernels) and kernels[-1].name == match[1]
        elif (match := SPILLS.search(line)) and kernels:
            kernels[-1].spill_bytes += int(match[2]) + int(match[3])
            if of_entry:
                kernels[-1].stack_bytes = int(match[1])
        elif (match := REGISTERS.search(line)) and kernels:
            kernels[-1].registers = int(match[1])
        if SERIALISED.search(line):
            complaints.append(line.strip())
    return kernels, complaints


def readable(name: str) -> str:
    if not shutil.which("c++filt"):
        return name
    text = subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout
    return re.sub(r"\(.*\)$", "", text.strip().replace("(anonymous namespace)::", ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--architecture", default="sm_90a")
    parser.add_argument("--require", action="store_true", help="fail when no kernel is found")
    arguments = parser.parse_args()
    kernels, complaints = parse(arguments.log.read_text(errors="replace"))
    main_kernels = [kernel for kernel in kernels if kernel.architecture == arguments.architecture]
    for kernel in main_kernels:
        verdict = f"SPILLS {kernel.spill_bytes} bytes" if kernel.spill_bytes else "no spill"
        print(f"{kernel.registers:4} registers, {verdict}: {readable(kernel.name)}")
    for complaint in complaints:
        print(complaint)
    spilling = sum(kernel.spill_bytes > 0 for kernel in main_kernels)
    print(
        f"spills: {len(main_kernels)} kernels for {arguments.architecture}, {spilling} spill, "
        f"{len(complaints)} serialised"
    )
    missing = arguments.require and not main_kernels
    if missing:
        print(f"no kernel for {arguments.architecture} in the log; was it a clean build?")
    return 1 if spilling or complaints or missing else 0


if __name__ == "__main__":
    sys.exit(main())
