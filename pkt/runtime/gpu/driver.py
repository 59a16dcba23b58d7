"""The CUDA driver calls that the heap is made of. The tests put a fake in the place of CudaDriver.

Every call either succeeds or raises DriverError, which names rank, call and code. Addresses, sizes and handles are
ints. An export is a file descriptor, which the caller closes, or the 64 bytes of a fabric handle, which other hosts of
the NVLink domain can import too. Only `multicast.py` makes the multicast calls at the end, after every rank has voted
for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from pkt.errors import DriverError
from pkt.runtime.gpu import nvml

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
NOT_FOUND = 500  # CUDA_ERROR_NOT_FOUND
Shared = int | bytes  # a file descriptor, or a fabric handle
_sides: dict[int, tuple[int, int, torch.Tensor]] = {}  # device -> what `write_words` writes with
_returned: defaultdict[int, list[int]] = defaultdict(list)  # device -> streams to lend again
_writing = threading.Lock()
_storage_at = getattr(torch._C, "_construct_storage_from_data_pointer", None)  # private: other releases may lack it
_REMEDY = {
    2: "free memory on this GPU, or lower heap= or PKT_HEAP",
    100: "no CUDA device is visible (CUDA_VISIBLE_DEVICES, or the container's --gpus)",
    304: "the operating system refused; try a larger `ulimit -n` and `ulimit -v`",
    800: "ranks on several hosts need nvidia-imex on each, and its channel in each container",
    801: "this GPU or driver does not support it",
    802: "the NVLink fabric is not ready: is nvidia-fabricmanager running?",
    999: "see dmesg for an Xid",
}


class _Array:
    """An address range as __cuda_array_interface__, which is how torch takes memory that is not its own."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3
        }  # fmt: skip


class CudaDriver:
    """The driver calls of one rank, over cuda.bindings. `device` is an ordinal of this process. They use the current
    device's primary context, as torch does. fabric: export fabric handles, not file descriptors; set before anything is
    made."""

    def __init__(self, rank: int) -> None:
        from cuda.bindings import driver  # here, because importing pkt must not need a driver

        self.rank, self.fabric = rank, False
        self._cuda = driver
        self._empty: dict[Any, torch.Tensor] = {}  # (device, dtype) -> an empty tensor, to make others from
        self._first: torch.cuda.CUDAGraph | None = None  # the first recording, which owns the memory of all
        self._call("cuInit", 0)

    def _call(self, name: str, *args: Any) -> Any:
        code, *result = getattr(self._cuda, name)(*args)  # by name, for the error message
        if int(code) != 0:
            # A driver that is newer than the bindings may return a code that they have no name for.
            known = code.name if isinstance(code, self._cuda.CUresult) else str(code)
            raise DriverError.failed(self.rank, name, int(code), known, _REMEDY.get(int(code), ""))
        return result[0] if len(result) == 1 else tuple(result)

    # -- queries
    def holds(self, module: int, name: str) -> bool:
        """Whether a loaded module has a variable of that name."""
        code, *_ = self._cuda.cuModuleGetGlobal(module, name.encode())
        if int(code) not in (0, NOT_FOUND):
            raise DriverError.failed(self.rank, "cuModuleGetGlobal", int(code), str(code))
        return int(code) == 0

    def version(self) -> int:
        """The newest CUDA that the driver knows: 13010 is 13.1."""
        return int(self._call("cuDriverGetVersion"))

    def device_count(self) -> int:
        return int(self._call("cuDeviceGetCount"))

    def name(self, device: int) -> str:
        return self._call("cuDeviceGetName", 128, device).split(b"\0")[0].decode()

    def uuid(self, device: int) -> str:
        return bytes(self._call("cuDeviceGetUuid", device).bytes).hex()

    def memory(self, device: int) -> int:
        """Bytes of the GPU's memory, free or not."""
        return int(self._call("cuDeviceTotalMem", device))

    def attribute(self, device: int, name: str) -> int:
        """A CU_DEVICE_ATTRIBUTE by its name without the prefix, such as "MULTIPROCESSOR_COUNT"."""
        kind = vars(self._cuda.CUdevice_attribute)[f"CU_DEVICE_ATTRIBUTE_{name}"]
        return int(self._call("cuDeviceGetAttribute", kind, device))

    def p2p(self, device: int, peer: int, name: str) -> int:
        """A CU_DEVICE_P2P_ATTRIBUTE by its name without the prefix, such as "ACCESS_SUPPORTED"."""
        kind = vars(self._cuda.CUdevice_P2PAttribute)[f"CU_DEVICE_P2P_ATTRIBUTE_{name}"]
        return int(self._call("cuDeviceGetP2PAttribute", kind, device, peer))

    def domain(self, device: int) -> str:
        """The NVLink domain over several hosts that the GPU is in, as "cluster/clique"; "" where it is in none."""
        return nvml.domain(self.uuid(device))

    # -- physical memory
    @property
    def _shared(self) -> Any:
        kinds = self._cuda.CUmemAllocationHandleType
        return kinds.CU_MEM_HANDLE_TYPE_FABRIC if self.fabric else kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _kind(self, device: int) -> Any:
        cuda = self._cuda
        kind = cuda.CUmemAllocationProp()
        kind.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind.location.id = device
        kind.requestedHandleTypes = self._shared
        return kind

    def granularity(self, device: int) -> int:
        option = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._call("cuMemGetAllocationGranularity", self._kind(device), option))

    def create(self, device: int, nbytes: int) -> int:
        """Handle of new physical memory that can be exported."""
        return int(self._call("cuMemCreate", nbytes, self._kind(device), 0))

    def release(self, handle: int) -> None:
        """Drop a handle; what is mapped stays until it is unmapped."""
        self._call("cuMemRelease", handle)

    def export(self, handle: int) -> Shared:
        """A file descriptor or fabric handle of the memory. An open descriptor keeps the memory: close it at once."""
        found = self._call("cuMemExportToShareableHandle", handle, self._shared, 0)
        return bytes(found.data) if self.fabric else int(found)

    def import_memory(self, shared: Shared) -> int:
        """Handle of the memory that a peer exported. The caller still has to close a file descriptor."""
        # cuda.bindings takes the bytes of a fabric handle, but not the CUmemFabricHandle that an export returns.
        return int(self._call("cuMemImportFromShareableHandle", shared, self._shared))

    # -- addresses
    def reserve(self, nbytes: int, alignment: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, alignment, 0, 0))

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def allow(self, address: int, nbytes: int, device: int) -> None:
        """Let `device` read and write the memory that is mapped there."""
        cuda = self._cuda
        access = cuda.CUmemAccessDesc()
        access.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = device
        access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", address, nbytes, [access], 1)

    # -- use
    def view(self, address: int, nbytes: int, device: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Tensor of one dimension over mapped memory."""
        if _storage_at is None:
            return torch.as_tensor(_Array(address, nbytes), device=torch.device("cuda", device)).view(dtype)
        # Takes a tenth of the time, and every allocation of the heap makes such a tensor.
        empty = self._empty.get((device, dtype))
        if empty is None:
            empty = self._empty[device, dtype] = torch.empty(0, dtype=dtype, device=torch.device("cuda", device))
        return empty.new_empty(0).set_(_storage_at(address, empty.device, nbytes))

    def copy(
        self, target: int, source: int, shape: tuple[int, int, int], to: tuple[int, int], of: tuple[int, int],
        stream: int,
    ) -> None:  # fmt: skip
        """Queue a copy by a copy engine on a stream. shape: planes, runs in a plane, bytes in a run. to, of: at target
        and source, bytes from one run to the next and from one plane to the next; the second is a multiple of the
        first."""
        planes, runs, nbytes = shape
        if planes * runs == 1:
            self._call("cuMemcpyDtoDAsync", target, source, nbytes, stream)
            return
        # Not torch's copy_, which is a kernel between tensors of such strides.
        box = self._cuda.CUDA_MEMCPY3D()
        box.srcMemoryType = box.dstMemoryType = self._cuda.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        box.dstDevice, box.srcDevice = target, source
        (box.dstPitch, target_plane), (box.srcPitch, source_plane) = to, of
        if planes > 1:
            box.dstHeight, box.srcHeight = target_plane // to[0], source_plane // of[0]
        else:
            box.dstHeight = box.srcHeight = runs
        box.WidthInBytes, box.Height, box.Depth = nbytes, runs, planes
        self._call("cuMemcpy3DAsync", box, stream)

    def hold(self, address: int, value: int, stream: int) -> None:
        """The stream goes on when the int32 there is `value` or more, by the sign of the 32-bit difference."""
        self._call("cuStreamWaitValue32", stream, address, value, 0)  # 0: CU_STREAM_WAIT_VALUE_GEQ

    def lend_stream(self, device: int) -> int:
        """Handle of a stream of the device that nobody else has, and that does not wait for the default one."""
        # None is ever destroyed: torch's allocator and graphs name the streams that they were used on to their end.
        if _returned[device]:
            return _returned[device].pop()
        with torch.cuda.device(device):
            return int(self._call("cuStreamCreate", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def return_stream(self, device: int, stream: int) -> None:
        """Lend a stream again, from now on; what is queued there goes on to its end."""
        _returned[device].append(stream)

    def uncouple(self, stream: int) -> None:
        """Make the kernel last recorded on a capturing stream an ordinary node of the graph, not a cooperative one."""
        _, _, _, nodes, *_ = self._call("cuStreamGetCaptureInfo", stream)  # the nodes that the next one depends on
        attribute = self._cuda.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        value = self._cuda.CUkernelNodeAttrValue()
        value.cooperative = 0
        self._call("cuGraphKernelNodeSetAttribute", nodes[0], attribute, value)

    def record(self, run: Callable[[], Any]) -> int:
        """Handle of a graph of what `run()` queues on the current stream, which must not be the default one, and on
        those that it forks and joins. Nothing of it runs before `replay`. What torch allocates inside stays for all
        graphs of this driver, which therefore must not run at the same time."""
        recorded = torch.cuda.CUDAGraph(keep_graph=True)
        # Relaxed: no other call of this process, such as the garbage collector's of cudaFree, ends the recording.
        recorded.capture_begin(self._first.pool() if self._first else None, "relaxed")
        try:
            run()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # it may have ended the recording; its own error says more
                recorded.capture_end()
            raise
        recorded.capture_end()
        self._first = self._first or recorded
        flags = self._cuda.CUgraphInstantiate_flags
        free, priority = (
            flags.CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH, flags.CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY
        )  # fmt: skip
        # As torch does. Not its replay, which may first write the state of its random numbers.
        graph = self._cuda.CUgraph(recorded.raw_cuda_graph())
        return int(self._call("cuGraphInstantiate", graph, int(free | priority)))

    def allocation(self, address: int) -> int | None:
        """The number of the allocation that has the address, CU_POINTER_ATTRIBUTE_BUFFER_ID: freed ones' do not come
        again. None where there is none, as for memory that was mapped."""
        attribute = self._cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        code, found = self._cuda.cuPointerGetAttribute(attribute, address)
        return int(found) or None if int(code) == 0 else None

    def replay(self, graph: int, stream: int) -> None:
        """Queue all that a graph has on the stream."""
        self._call("cuGraphLaunch", graph, stream)

    def forget(self, graph: int) -> None:
        """Give a graph back; a replay that runs goes on to its end."""
        with self._beside_captures():  # it may happen whenever Python collects garbage
            self._call("cuGraphExecDestroy", graph)

    def synchronize(self, device: int) -> None:
        torch.cuda.synchronize(device)

    def write_words(self, address: int, words: list[int], device: int) -> None:
        """Write int32 words while kernels run, from any thread; returns when they are written."""
        with _writing:
            context, stream, page = self._side(device)
            self._call("cuCtxPushCurrent", context)  # a new thread has none
            try:
                with self._beside_captures():
                    page[: len(words)] = torch.tensor(words, dtype=torch.int32, device="cpu")
                    self._call("cuMemcpyHtoDAsync", address, page.data_ptr(), 4 * len(words), stream)
                    self._call("cuStreamSynchronize", stream)
            finally:
                self._call("cuCtxPopCurrent")

    def _side(self, device: int) -> tuple[int, int, torch.Tensor]:
        """The device's context, a stream that nobody else has, and a pinned page: this process keeps them. The first
        call for a device makes them, before any kernel runs, because that may wait for kernels."""
        # torch lends each of its streams to many. One of them may record a graph, and what is queued on it is recorded.
        # Nor does torch copy the page: when it frees such a page, it records an event on the stream of the copy.
        if device not in _sides:
            with torch.cuda.device(device):
                page = torch.empty(64, dtype=torch.int32, device="cpu", pin_memory=True)
                context, stream = self._call("cuCtxGetCurrent"), self.lend_stream(device)
            _sides[device] = int(context), stream, page
        return _sides[device]

    @contextlib.contextmanager
    def _beside_captures(self) -> Iterator[None]:
        """Calls of this thread end no graph that the process records at the moment."""
        mode = self._call(
            "cuThreadExchangeStreamCaptureMode", self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        )
        try:
            yield
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", mode)

    # -- multicast
    def _multicast(self, devices: int, nbytes: int) -> Any:
        prop = self._cuda.CUmulticastObjectProp()
        prop.numDevices, prop.size, prop.handleTypes, prop.flags = devices, nbytes, int(self._shared), 0
        return prop

    def multicast_granularity(self, devices: int, nbytes: int) -> int:
        option = self._cuda.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_RECOMMENDED
        return int(self._call("cuMulticastGetGranularity", self._multicast(devices, nbytes), option))

    def multicast_create(self, devices: int, nbytes: int) -> int:
        return int(self._call("cuMulticastCreate", self._multicast(devices, nbytes)))

    def multicast_add(self, handle: int, device: int) -> None:
        self._call("cuMulticastAddDevice", handle, device)

    def multicast_bind(self, handle: int, offset: int, memory: int, nbytes: int) -> None:
        self._call("cuMulticastBindMem", handle, offset, memory, 0, nbytes, 0)

    def multicast_unbind(self, handle: int, device: int, offset: int, nbytes: int) -> None:
        self._call("cuMulticastUnbind", handle, device, offset, nbytes)
