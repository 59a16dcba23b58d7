"""cuBLASMp 0.7.0 as a baseline: NVIDIA's own overlapped products, through its C API, without multicast.

It is there if nvidia-cublasmp-cu13 0.7.0 and nvshmem4py are installed. Other versions are not loaded, because later
ones create multicast objects by themselves. Operands and results are in NVSHMEM's memory. A matrix of torch, stored by
rows, is its own transpose in cuBLAS, stored by columns, so cuBLASMp computes C^T = B^T A^T. Its calls cannot be
captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes as C
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch

from pkt.errors import Unsupported

VERSION = "0.7.0"
ALGORITHMS = {"cuBLASMp": 0, "cuBLASMp, split": 1}
"""Variant -> its algorithm: its own choice, or a product split into parts with copies between GPUs."""
ENVIRONMENT = {"NVSHMEM_DISABLE_NVLS": "1", "NVSHMEM_SYMMETRIC_SIZE": "10G", "CUBLASMP_DISABLE_MULTICAST": "1"}
BF16, COMPUTE_32F = 14, 68  # cudaDataType_t, cublasComputeType_t
TRANSA, TRANSB, ALGO, EPILOGUE = 0, 1, 3, 5  # attributes of a product
SUM_OVER_RANKS = 1  # an epilogue
WORKSPACE = 512  # least bytes
I64: TypeAlias = C.c_int64
VOID: TypeAlias = C.c_void_p


class UniqueId(C.Structure):
    _fields_ = [("bytes", C.c_char * 128)]


def library() -> Path | None:
    """The library's file, in the folders of sys.path."""
    found = (Path(folder, "nvidia", "cublasmp", "cu13", "lib", "libcublasmp.so.0") for folder in sys.path)
    return next((path for path in found if path.is_file()), None)


def missing() -> str:
    """Why it cannot be a baseline; "" if it can."""
    if library() is None:
        return "nvidia-cublasmp-cu13 is not installed"
    version = importlib.metadata.version("nvidia-cublasmp-cu13")
    if not version.startswith(f"{VERSION}."):
        return f"nvidia-cublasmp-cu13 is {version}, wanted {VERSION}"
    if importlib.util.find_spec("nvshmem") is None:
        return "nvshmem4py is not installed"
    return ""


def check(status: int, call: str) -> None:
    """Raise Unsupported if a call of the C API failed."""
    if status:
        raise Unsupported.here(call, f"found status {status}", "cuBLASMp does not take this product here")


class CuBLASMp:
    """One rank's handle, its communicator and its two grids of ranks. Made once in a process; collective."""

    def __init__(self, world: Any) -> None:
        for name, value in ENVIRONMENT.items():
            if os.environ.get(name) != value:
                raise Unsupported.here("cuBLASMp", f"found {name}={os.environ.get(name)!r}", f"wanted {value!r}")
        self.size = world.size
        _start_nvshmem(world)
        self.mp = C.CDLL(str(library()))
        self._declare()
        comm = _communicator(world)
        self.handle, self.stream = VOID(), torch.cuda.current_stream().cuda_stream
        check(self.mp.cublasMpCreate(C.byref(self.handle), VOID(self.stream)), "cublasMpCreate")
        self.rows, self.columns = VOID(), VOID()
        check(self.mp.cublasMpGridCreate(self.size, 1, 0, comm, C.byref(self.rows)), "cublasMpGridCreate")
        check(self.mp.cublasMpGridCreate(1, self.size, 1, comm, C.byref(self.columns)), "cublasMpGridCreate")

    def _declare(self) -> None:
        of = C.POINTER
        matrix: list[Any] = [VOID, I64, I64, VOID]
        product: list[Any] = [VOID, VOID, I64, I64, I64, VOID, *matrix, *matrix, VOID, *matrix, *matrix]
        self.mp.cublasMpGridCreate.argtypes = [I64, I64, C.c_int, VOID, of(VOID)]
        self.mp.cublasMpMatrixDescriptorCreate.argtypes = [I64, I64, I64, I64, I64, I64, I64, C.c_int, VOID, of(VOID)]
        self.mp.cublasMpMatmulDescriptorCreate.argtypes = [of(VOID), C.c_int]
        self.mp.cublasMpMatmulDescriptorAttributeSet.argtypes = [VOID, C.c_int, VOID, C.c_size_t]
        self.mp.cublasMpMatmul_bufferSize.argtypes = [*product, of(C.c_size_t), of(C.c_size_t)]
        self.mp.cublasMpMatmul.argtypes = [*product, VOID, C.c_size_t, VOID, C.c_size_t]

    def _matrix(self, m: int, n: int, block_m: int, block_n: int, grid: VOID) -> VOID:
        """A descriptor of a matrix (m, n) in cuBLAS's order, of which every rank of the grid has one block."""
        made = VOID()
        status = self.mp.cublasMpMatrixDescriptorCreate(
            m, n, block_m, block_n, 0, 0, block_m, BF16, grid, C.byref(made)
        )
        check(status, "cublasMpMatrixDescriptorCreate")
        return made

    def product(self, operator: str, M: int, N: int, K: int, transposed: bool) -> Product:
        """An operator's product; M, N, K of the product that each rank computes. transposed: the weights are stored as
        (N, K). Collective; `Product.free` gives its memory back."""
        W, rows, columns = self.size, self.rows, self.columns
        m = M if operator == "matmul_all_reduce" else M // W  # rows of a block
        if operator == "all_gather_matmul":
            sizes, a, out = (N * W, M, K), (m, K), (M, N)
            weights = (K, N * W, K, N, columns) if transposed else (N * W, K, N, K, rows)
            inputs, result = (K, M, K, m, columns), (N * W, M, N, m, rows)
        else:
            sizes, a, out = (N, M, K * W), (M, K), (m, N)
            weights = (K * W, N, K, N, rows) if transposed else (N, K * W, N, K, columns)
            inputs = (K * W, M, K, m, rows)
            result = (N * W, M, N, m, rows) if operator == "matmul_all_reduce" else (N, M, N, m, columns)
        epilogue = SUM_OVER_RANKS if operator == "matmul_all_reduce" else 0
        matrices = [self._matrix(*each) for each in (weights, inputs, result)]
        return Product(self, sizes, matrices, a, out, transposed, epilogue)


class Product:
    """A product whose input and result are in symmetric memory."""

    def __init__(
        self, mp: CuBLASMp, sizes: tuple[int, int, int], matrices: list[VOID], a: tuple[int, int],
        out: tuple[int, int], transposed: bool, epilogue: int,
    ) -> None:  # fmt: skip
        self.mp, self.sizes, self.matrices, self.transposed, self.epilogue = mp, sizes, matrices, transposed, epilogue
        self.one, self.zero = C.c_float(1), C.c_float(0)
        self.held: list[torch.Tensor] = []
        self.described: list[VOID] = []
        self.a, self.out = self._symmetric(a), self._symmetric(out)

    def _symmetric(self, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        from nvshmem.core.interop.torch import bytetensor

        count = dtype.itemsize
        for n in shape:
            count *= n
        made = bytetensor((count,), dtype=torch.uint8)
        self.held.append(made)
        return made.view(dtype).view(*shape)

    def free(self) -> None:
        """Give the descriptors and the symmetric memory back. Collective."""
        from nvshmem.core.interop.torch import free_tensor

        torch.cuda.synchronize()
        for matrix in self.matrices:
            check(self.mp.mp.cublasMpMatrixDescriptorDestroy(matrix), "cublasMpMatrixDescriptorDestroy")
        for described in self.described:
            check(self.mp.mp.cublasMpMatmulDescriptorDestroy(described), "cublasMpMatmulDescriptorDestroy")
        held, self.held = self.held, []
        del self.a, self.out
        for made in held:
            free_tensor(made)

    def algorithm(self, number: int, b: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """A function that multiplies by weights like `b` and returns `out`. Collective. Raises Unsupported."""
        lib, described = self.mp.mp, VOID()
        check(lib.cublasMpMatmulDescriptorCreate(C.byref(described), COMPUTE_32F), "cublasMpMatmulDescriptorCreate")
        self.described.append(described)
        attributes = {TRANSA: int(self.transposed), TRANSB: 0, ALGO: number}
        for name, value in (attributes | ({EPILOGUE: self.epilogue} if self.epilogue else {})).items():
            status = lib.cublasMpMatmulDescriptorAttributeSet(described, name, C.byref(C.c_int(value)), 4)
            check(status, "cublasMpMatmulDescriptorAttributeSet")
        weights, inputs, result = self.matrices
        x, y = self.a.data_ptr(), self.out.data_ptr()
        head = (self.mp.handle, described, *self.sizes, C.addressof(self.one))
        tail = (x, 1, 1, inputs, C.addressof(self.zero), y, 1, 1, result, y, 1, 1, result)
        on_device, on_host = C.c_size_t(), C.c_size_t()
        least = (*head, b.data_ptr(), 1, 1, weights, *tail, C.byref(on_device), C.byref(on_host))
        check(lib.cublasMpMatmul_bufferSize(*least), "cublasMpMatmul_bufferSize")
        most = torch.tensor([on_device.value], device="cuda")
        torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        workspace = self._symmetric((max(int(most.item()), WORKSPACE),), torch.uint8)
        host = (C.c_char * max(on_host.value, 16))()
        end = (workspace.data_ptr(), on_device.value, C.addressof(host), on_host.value)
        kept = (workspace, host)

        def run(b: torch.Tensor) -> torch.Tensor:
            assert kept
            check(lib.cublasMpMatmul(*head, b.data_ptr(), 1, 1, weights, *tail, *end), "cublasMpMatmul")
            return self.out

        return run


def _start_nvshmem(world: Any) -> None:
    """Join NVSHMEM by a unique id from rank 0. Collective."""
    import numpy as np
    import nvshmem.core as nvshmem
    from cuda.core import Device

    device = Device(world.torch_device.index)
    device.set_current()
    made = nvshmem.get_unique_id(empty=world.rank != 0)
    told = world.broadcast(bytes(made._data.tobytes()))
    if world.rank:
        made._data.view(np.int8).reshape(-1)[:] = np.frombuffer(told, dtype=np.int8)
    nvshmem.init(device=device, uid=made, rank=world.rank, nranks=world.size, initializer_method="uid")


def _communicator(world: Any) -> VOID:
    """A communicator of NCCL. Collective."""
    nccl, made, comm = C.CDLL("libnccl.so.2"), UniqueId(), VOID()
    if world.rank == 0:
        check(nccl.ncclGetUniqueId(C.byref(made)), "ncclGetUniqueId")
    told = world.broadcast(bytes(C.string_at(C.byref(made), C.sizeof(made))))
    C.memmove(C.byref(made), told, C.sizeof(made))
    nccl.ncclCommInitRank.argtypes = [C.POINTER(VOID), C.c_int, UniqueId, C.c_int]
    check(nccl.ncclCommInitRank(C.byref(comm), world.size, made, world.rank), "ncclCommInitRank")
    return comm


_made: list[CuBLASMp] = []


def handle(world: Any) -> CuBLASMp:
    """The process's handle. Collective the first time."""
    if not _made:
        _made.append(CuBLASMp(world))
    return _made[0]
