"""Peak memory of tokenising a text file with a tokenizer of bytes: a process of its own, measured.

python text_memory.py FOLDER MEGABYTES PROCESSES
"""

from __future__ import annotations

import json
import sys
import threading
import time
import unicodedata
from pathlib import Path

from oomb.cli.demo_text import python_source
from oomb.cli.demo_tokenizer import byte_tokenizer
from oomb.train.sequences import Tokens
from oomb.train.sources import find_sources
from oomb.train.tokenise import Rule, tokenise


def resident_bytes(process: int) -> int:
    """Resident memory of a process and all below it; a page that several share counts once."""
    total = 0
    try:
        rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                total += resident_bytes(int(child))
    except OSError:  # it ended while we looked
        return total
    lines = [line for line in rollup.splitlines() if line.startswith("Pss:")]
    return total + sum(int(line.split()[1]) * 1024 for line in lines)


def write_text(path: Path, num_bytes: int) -> None:
    """The source of Python's library, over and over; each copy begins with its number.

    Characters are composed, as the tokenizer makes them: so a byte is a token.
    """
    text = python_source().train.numpy().tobytes().decode(errors="ignore")
    source = unicodedata.normalize("NFC", text).encode()
    with path.open("wb") as file:
        number = 0
        while file.tell() < num_bytes:
            file.write(f"# copy {number}\n".encode())
            file.write(source[: num_bytes - file.tell()])
            number += 1


def main() -> None:
    folder, megabytes, processes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    text = folder / "text.txt"
    write_text(text, megabytes * 10**6)
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.2):
            peak = max(peak, resident_bytes(int(Path("/proc/self").readlink().name)))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    sources = find_sources("data.train", [str(text)])
    rule = Rule(byte_tokenizer().backend_tokenizer.to_str(), (), ())
    tokens = Tokens(tokenise(sources, rule, num_proc=processes, cache_dir=str(folder / "cache")))
    seconds = time.monotonic() - began
    done.set()
    watcher.join()
    found = {"bytes": text.stat().st_size, "tokens": len(tokens)}
    print(json.dumps({**found, "peak_bytes": peak, "seconds": seconds}))


if __name__ == "__main__":
    main()
