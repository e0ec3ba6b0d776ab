"""``python -m tvmgemm info``: what is installed, what this machine offers, which settings are in force."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform

import numpy as np

import tvmgemm
from tvmgemm import dispatch, settings
from tvmgemm.build.link import find_linker
from tvmgemm.family.isa import ISAS
from tvmgemm.family.tiles import KERNEL_DTYPES
from tvmgemm.host import host
from tvmgemm.store import open_store
from tvmgemm.store.key import TVM_FFI_VERSION, TVM_VERSION


def main(argv: list[str]) -> int:
    """Print the facts as text, or with ``--json`` as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m tvmgemm info",
        description="Versions, this machine, the kernel cache and the settings in force.",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    facts = collect()
    print(json.dumps(facts, indent=2) if parser.parse_args(argv).json else render(facts))
    return 0


def collect() -> dict:
    """All facts, JSON-ready. Imports no TVM; sizes are bytes."""
    machine, current = host(), settings.current()
    ours = [isa for isa in ISAS.values() if isa.arch == machine.arch]
    usable = [isa.name for isa in ours if isa.requires <= machine.features]
    isa = machine.isa(current.max_isa)
    linker = find_linker()
    store = open_store()
    entries = store.entries()
    return {
        "versions": {
            "tvmgemm": tvmgemm.__version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        "numpy_blas": numpy_blas(),
        "compiler": {
            "tvm": _installed("apache-tvm", TVM_VERSION),
            "tvm_ffi": _installed("apache-tvm-ffi", TVM_FFI_VERSION),
            "linker": " ".join(linker.command) if linker else None,
        },
        "host": {
            "arch": machine.arch,
            "model": machine.model,
            "isa": isa.name if isa else None,
            "isas": usable,
            "features": sorted(machine.features),
            "caches": [
                {"level": c.level, "bytes": c.bytes, "ways": c.ways, "line": c.line, "shared_by": c.shared_by}
                for c in (machine.cache(level) for level in (1, 2, 3))
            ],
            "cores": machine.cores,
        },
        "threads": current.threads,
        "cache": {
            "folder": store.folder,
            "entries": len(entries),
            "bytes": sum(entry.bytes for entry in entries),
            "limit": store.limit,
            "tuned": len(dispatch.tuned(current)),
        },
        "dtypes": list(KERNEL_DTYPES),
        "settings": {
            name: {"value": getattr(current, name), "source": source}
            for name, source in settings.sources().items()
        },
    }


def numpy_blas() -> dict[str, str | int | None]:
    """NumPy's BLAS: its name and version; where threadpoolctl is installed also its kernels and threads."""
    built = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    facts = {"name": built.get("name", "unknown"), "version": built.get("version", "unknown")}
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        loaded = []
    else:
        loaded = [library for library in threadpool_info() if library["user_api"] == "blas"]
    # SciPy loads a BLAS of its own; NumPy's lies in a folder named after it.
    own = next((library for library in loaded if "numpy" in library["filepath"]), loaded[0] if loaded else {})
    return {**facts, "architecture": own.get("architecture"), "threads": own.get("num_threads")}


def plan_text(explanation) -> str:
    """An Explanation in a few words: variant, micro-tile, packing, parallel loop; or why NumPy computes."""
    if not explanation.served:
        return f"NumPy: {explanation.reason}"
    packing = "unpacked" if explanation.packing == "none" else explanation.packing
    if not explanation.blocked and not explanation.shape:  # micro-tiles and nothing around them
        packing = "unblocked"
    shared = f" {explanation.parallel_loop}/{explanation.threads}" if explanation.parallel_loop else ""
    return f"{explanation.variant} {explanation.micro_kernel} {packing}{shared}"


def render(facts: dict) -> str:
    """The facts as aligned lines of text."""
    versions, blas, compiler, machine = (facts[x] for x in ("versions", "numpy_blas", "compiler", "host"))
    kernels = f", {blas['architecture']} kernels, {blas['threads']} threads" if blas["architecture"] else ""
    lines = [
        ("tvmgemm", versions["tvmgemm"]),
        ("Python", versions["python"]),
        ("NumPy", f"{versions['numpy']}, {blas['name']} {blas['version']}{kernels}"),
        ("TVM", _compiler_text(compiler["tvm"])),
        ("TVM FFI", _compiler_text(compiler["tvm_ffi"])),
        ("linker", compiler["linker"] or "none found: kernels can't be built, NumPy computes"),
        ("CPU", machine["model"] or machine["arch"]),
        ("ISA", f"{machine['isa'] or 'none of ours'} (available: {', '.join(machine['isas']) or 'none'})"),
        ("data caches", ", ".join(map(_cache_text, machine["caches"]))),
        ("threads", f"{facts['threads']} (cores this process may use: {machine['cores']})"),
        ("dtypes", ", ".join(facts["dtypes"])),
        ("kernel cache", _store_text(facts["cache"])),
    ]
    text = [f"{name:<13} {value}" for name, value in lines]
    text += ["", "settings"]
    for name, setting in facts["settings"].items():
        text.append(f"  {name:<12} {_value_text(setting['value']):<24} {setting['source']}")
    return "\n".join(text)


def _installed(package: str, pinned: str) -> dict[str, str | None]:
    """The version whose metadata is installed; what is really imported is checked where kernels are built."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = None
    return {"installed": version, "pinned": pinned}


def _compiler_text(versions: dict) -> str:
    installed, pinned = versions["installed"], versions["pinned"]
    if installed is None:
        return f"not installed: only kernels in the cache are used ({pinned} builds them)"
    return installed if installed == pinned else f"{installed}, but only {pinned} builds kernels"


def _store_text(store: dict) -> str:
    if store["folder"] is None:
        return "none: the folder can't be used (see the warning)"
    megabytes = store["bytes"] / (1 << 20)
    tuned = f", {store['tuned']} tuned products" if store["tuned"] else ""
    return f"{store['folder']}: {store['entries']} kernels, {megabytes:.1f} MiB of {store['limit'] >> 20} MiB{tuned}"


def _cache_text(cache: dict) -> str:
    size = cache["bytes"] >> 10
    amount = f"{size >> 10} MiB" if size >= 1024 else f"{size} KiB"
    shared = f", shared by {cache['shared_by']}" if cache["shared_by"] > 1 else ""
    return f"L{cache['level']} {amount} ({cache['ways']}-way{shared})"


def _value_text(value: object) -> str:
    return "-" if value is None else str(value)
