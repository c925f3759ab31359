"""How long `import oomb` and `oomb --help` take in a fresh process: they must not feel slow.

PYTHONPATH=python python bench/cpu_start_time.py [--runs N]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

# What is timed: its command line behind the interpreter, and the most seconds that it may take.
COMMANDS = {
    "python": (["-c", ""], None),
    "import oomb": (["-c", "import oomb"], 0.15),
    "oomb --help": (["-m", "oomb", "--help"], 0.5),
    "oomb train --help": (["-m", "oomb", "train", "--help"], 0.5),
}


def seconds(words: list[str]) -> tuple[float, float]:
    """On the clock, and of a core: the second stays what it is on a machine with other work."""
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    print(f"{'median of seconds':20}{'clock':>8}{'core':>8}{'at most':>9}")
    for name, (words, limit) in COMMANDS.items():
        seconds(words)  # the files are then in memory
        runs = [seconds(words) for _ in range(options.runs)]
        clock, core = (statistics.median(times) for times in zip(*runs, strict=True))
        print(f"{name:20}{clock:8.3f}{core:8.3f}{f'{limit}' if limit else '':>9}", flush=True)


if __name__ == "__main__":
    main()
