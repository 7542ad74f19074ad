"""Where Triton keeps compiled kernels on disk, and a digest of the sources that they are compiled from."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path

from triton import knobs

from kernels.variants import KernelCache


def kernel_cache() -> KernelCache:
    """Reads the sources of `kernels.triton` without its gate, and of the modules beside it, some 400 KiB."""
    digest, kernels = hashlib.sha256(metadata.version("triton").encode()), Path(__file__).parents[2]
    for path in sorted([*kernels.glob("*.py"), *kernels.glob("triton/*.py"), *kernels.glob("triton/*/*.py")]):
        name = path.relative_to(kernels).as_posix()
        if not name.startswith("triton/gate/"):
            digest.update(name.encode() + path.read_bytes())
    return KernelCache(Path(knobs.cache.dir), digest.hexdigest())
