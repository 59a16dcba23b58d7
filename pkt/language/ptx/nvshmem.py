"""NVSHMEM's device library, as far as pkt calls it: wrappers that Triton can call, and what they need of NVIDIA's
bitcode.

The bitcode has 31 MB, and Triton would read it in every compilation, which takes 8 to 13 s. So it is stripped once on
the user's machine, with Triton's own LLVM, to 60 kB of text in pkt's folder of the user's cache directory. The text is
the same for sm_90 and sm_100. Nothing of it is part of pkt.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import triton

from pkt.errors import Unsupported

PACKAGES = ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12")
INSTALL = "pip install 'pkt-triton[nvshmem]'"
TRIED = ("3.4.5",)
"""Versions of NVSHMEM whose bitcode has been linked by Triton and has run."""
_ADD = 10  # NVSHMEM_SIGNAL_ADD

# Triton calls a function in every thread. NVSHMEM's *_block functions want all threads of the program, and its others
# want one. The program is synchronised before. All are `noinline`, so that a second call costs no second copy.
#
# put_signal releases what the program did before, as every signal of pkt does. Where NVSHMEM reaches the rank by
# stores, its own fence before the signal does that. Where a host thread passes the call on, it has none for the system.
WRAPPERS = f"""
target triple = "nvptx64-nvidia-cuda"
declare ptr @nvshmem_ptr(ptr, i32)
declare void @nvshmemx_putmem_nbi_block(ptr, ptr, i64, i32)
declare void @nvshmemx_putmem_signal_nbi_block(ptr, ptr, i64, ptr, i64, i32, i32)
declare void @nvshmemx_signal_op(ptr, i64, i32, i32)
declare void @nvshmem_fence()
declare void @nvshmem_quiet()
declare i32 @llvm.nvvm.read.ptx.sreg.tid.x()

define i32 @pkt_far_put(i64 %dst, i64 %src, i64 %nbytes, i32 %peer) #0 {{
  %to = inttoptr i64 %dst to ptr
  %from = inttoptr i64 %src to ptr
  call void @nvshmemx_putmem_nbi_block(ptr %to, ptr %from, i64 %nbytes, i32 %peer)
  ret i32 0
}}
define i32 @pkt_far_put_signal(i64 %dst, i64 %src, i64 %nbytes, i64 %lane, i64 %value, i32 %peer) #0 {{
entry:
  %to = inttoptr i64 %dst to ptr
  %from = inttoptr i64 %src to ptr
  %counter = inttoptr i64 %lane to ptr
  %there = call ptr @nvshmem_ptr(ptr %to, i32 %peer)
  %passed_on = icmp eq ptr %there, null
  br i1 %passed_on, label %release, label %send
release:
  call void asm sideeffect "fence.acq_rel.sys;", "~{{memory}}"()
  br label %send
send:
  call void @nvshmemx_putmem_signal_nbi_block(
    ptr %to, ptr %from, i64 %nbytes, ptr %counter, i64 %value, i32 {_ADD}, i32 %peer)
  ret i32 0
}}
define i32 @pkt_far_signal(i64 %lane, i64 %value, i32 %peer) #0 {{
entry:
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %first = icmp eq i32 %thread, 0
  br i1 %first, label %one, label %done
one:
  %counter = inttoptr i64 %lane to ptr
  call void @nvshmemx_signal_op(ptr %counter, i64 %value, i32 {_ADD}, i32 %peer)
  br label %done
done:
  ret i32 0
}}
define i32 @pkt_far_fence() #0 {{
entry:
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %first = icmp eq i32 %thread, 0
  br i1 %first, label %one, label %done
one:
  call void @nvshmem_fence()
  br label %done
done:
  ret i32 0
}}
define i32 @pkt_far_quiet() #0 {{
entry:
  %thread = call i32 @llvm.nvvm.read.ptx.sreg.tid.x()
  %first = icmp eq i32 %thread, 0
  br i1 %first, label %one, label %done
one:
  call void @nvshmem_quiet()
  br label %done
done:
  ret i32 0
}}
attributes #0 = {{ noinline nounwind convergent }}
"""
_NAMES = re.findall(r"^define i32 @(\w+)\(", WRAPPERS, re.M)


@functools.cache
def installed() -> tuple[str, str, Path] | None:
    """(package, version, folder of its libraries) of the NVSHMEM in this environment; None if there is none."""
    for package in PACKAGES:
        try:
            found = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        return package, found.version, Path(str(found.locate_file("nvidia/nvshmem/lib")))
    return None


def checked(call: str) -> tuple[str, str, Path]:
    """`installed()`. Raises Unsupported where there is none, or none that was tried. call: named in the message."""
    found = installed()
    if found is None:
        raise Unsupported.here(call, "found no NVSHMEM in this environment", INSTALL)
    package, version, folder = found
    if why := refusal(version):
        raise Unsupported.here(call, f"found {package} {version}, {why}", f"pip install '{package}=={TRIED[-1]}'")
    return package, version, folder


def refusal(version: str) -> str:
    """Why a version is not taken, as "which was never tried"; "" for one that is."""
    if version in TRIED:
        return ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if (3, 5) <= numbers < (3, 8):
        return "whose bitcode holds code for IBGDA: a kernel takes 2 to 22 s to compile"
    if numbers >= (3, 8):
        return "whose bitcode is newer than the LLVM of Triton 3.6"
    return "which was never tried"


def identity() -> str:
    """What compiled code depends on beside its own text: the library's package and version, "" for none."""
    found = installed()
    return f"{found[0]} {found[1]}" if found else ""


def library(call: str) -> Path:
    """The file that Triton links: made at the first use, then kept for all processes of this user. Raises Unsupported.
    call: named in the message."""
    package, version, folder = checked(call)
    bitcode = folder / "libnvshmem_device.bc"
    digest = hashlib.sha256(WRAPPERS.encode()).hexdigest()
    path = _folder() / f"{package}-{version}-triton-{triton.__version__}-{digest[:12]}.ll"
    if path.exists():
        return path
    if not bitcode.exists():
        raise Unsupported.here(call, f"found {package} {version} without {bitcode}", f"{INSTALL} anew")
    text = strip(bitcode)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, text)
    except OSError as error:
        found = f"found that {path.parent} cannot be written ({error})"
        raise Unsupported.here(call, found, "set XDG_CACHE_HOME to a folder that can be") from error
    return path


def _folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_path("pkt")) / "nvshmem"


def _write(path: Path, text: str) -> None:
    """Processes may write at once: each moves a whole file to its place."""
    handle, fresh = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise


def strip(bitcode: Path) -> str:
    """The wrappers, and all that they need of `bitcode`, as LLVM's text."""
    from triton._C.libtriton import ir, llvm, nvidia

    with tempfile.TemporaryDirectory() as folder:
        wrappers, calls = Path(folder) / "wrappers.ll", Path(folder) / "calls.mlir"
        wrappers.write_text(WRAPPERS, encoding="utf-8")
        declared = "\n".join(f"  llvm.func @{name}()" for name in _NAMES)
        calls.write_text(f"module {{\n{declared}\n}}\n", encoding="utf-8")
        context = ir.context()
        ir.load_dialects(context)
        nvidia.load_dialects(context)
        module = ir.parse_mlir_module(str(calls), context)
        llvm.init_targets()
        linked = llvm.to_module(module, llvm.context())
        llvm.attach_datalayout(linked, "nvptx64-nvidia-cuda", "sm_90a", "")
        # Only what is called and still missing is linked, so the order matters.
        llvm.link_extern_libs(linked, [str(wrappers), str(bitcode)])
        text = str(linked)
    return _exported(text, _NAMES)


def _exported(text: str, names: Sequence[str]) -> str:
    """Linking made everything internal; kernels call the wrappers by name."""
    for name in names:
        text = re.sub(rf"^define internal (.*@{name}\()", r"define \1", text, flags=re.M)
    return text
