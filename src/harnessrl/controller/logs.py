"""Logs of attempts: what is kept of them, and what is told of them."""

import os
from pathlib import Path
from typing import BinaryIO

__all__ = ["last_words", "prune", "shortened"]

LOGS_KEPT = 2000


def last_words(log: Path) -> str:
    """The last line of a log, which in most languages is the error."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
            lines = file.read().decode(errors="replace").split("\n")
    except FileNotFoundError:
        return ""
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last[:200]}" if last else ""


def shortened(file: BinaryIO, limit: int) -> str:
    """The beginning and the end of a file."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size <= limit:
        return file.read().decode(errors="replace")
    head = file.read(limit // 4)
    file.seek(size - limit * 3 // 4)
    gap = f"\n[… {size - limit} bytes left out …]\n"
    return head.decode(errors="replace") + gap + file.read().decode(errors="replace")


def prune(logs: Path) -> None:
    """Keep the newest logs only."""
    files = sorted(logs.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in files[LOGS_KEPT:]:
        path.unlink()
