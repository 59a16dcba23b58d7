"""CudaDriver against the real bindings' types, with every call recorded instead of made: no GPU, no driver needed."""

import contextlib
from collections import defaultdict

import numpy as np
import pytest
import torch
from cuda.bindings import driver as bindings

from pkt.errors import DriverError
from pkt.runtime.gpu import driver as gpu_driver
from pkt.runtime.gpu import nvml
from pkt.runtime.gpu.cuda import Engines
from pkt.runtime.gpu.driver import CudaDriver

from .fake_driver import DEFAULTS


class Recorded:
    """cuda.bindings.driver whose functions return (code, *answers[name]) and record their arguments."""

    def __init__(self):
        self.calls, self.answers, self.code = [], {}, bindings.CUresult.CUDA_SUCCESS

    def __getattr__(self, name):
        real = getattr(bindings, name)
        if not name.startswith("cu"):
            return real

        def call(*args):
            self.calls.append((name, args))
            return (self.code, *self.answers.get(name, ()))

        return call


@pytest.fixture
def recorded(monkeypatch):
    import cuda.bindings

    fake = Recorded()
    monkeypatch.setattr(cuda.bindings, "driver", fake)
    return fake


def test_the_kernel_recorded_last_is_no_longer_cooperative(recorded):
    node, status = bindings.CUgraphNode(9), bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    recorded.answers = {"cuStreamGetCaptureInfo": (status, 1, bindings.CUgraph(8), [node], None, 1)}
    CudaDriver(rank=1).uncouple(7)
    asked, (name, (changed, attribute, value)) = recorded.calls[-2:]
    assert asked == ("cuStreamGetCaptureInfo", (7,))
    assert name == "cuGraphKernelNodeSetAttribute"
    assert changed is node
    assert attribute == bindings.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    assert type(value) is bindings.CUkernelNodeAttrValue  # the bindings refuse other types of the same union
    assert value.cooperative == 0


@pytest.mark.parametrize(("code", "found", "number"), [(0, 5, 5), (0, 0, None), (1, 5, None)])
def test_an_allocation_has_the_driver_s_number(recorded, code, found, number):
    recorded.answers = {"cuPointerGetAttribute": (found,)}
    driver = CudaDriver(rank=1)
    recorded.code = bindings.CUresult(code)
    assert driver.allocation(1 << 40) == number
    assert recorded.calls[-1] == (
        "cuPointerGetAttribute", (bindings.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, 1 << 40)
    )  # fmt: skip


def test_memory_is_pinned_on_the_device_and_can_be_exported(recorded):
    recorded.answers = {
        "cuMemCreate": (bindings.CUmemGenericAllocationHandle(77),),
        "cuMemExportToShareableHandle": (5,),
        "cuMemImportFromShareableHandle": (bindings.CUmemGenericAllocationHandle(78),),
        "cuMemGetAllocationGranularity": (2 << 20,),
        "cuMemAddressReserve": (bindings.CUdeviceptr(1 << 40),),
    }
    driver = CudaDriver(rank=1)
    assert driver.granularity(3) == 2 << 20
    assert (driver.create(3, 4 << 20), driver.export(77), driver.import_memory(5)) == (77, 5, 78)
    assert driver.reserve(1 << 38, 2 << 20) == 1 << 40
    driver.map(1 << 40, 4 << 20, 77)
    driver.allow(1 << 40, 4 << 20, 3)
    driver.unmap(1 << 40, 4 << 20)
    driver.free(1 << 40, 1 << 38)
    driver.release(77)
    given = dict(recorded.calls)
    size, kind, flags = given["cuMemCreate"]
    assert (size, flags, kind.location.id) == (4 << 20, 0, 3)
    assert kind.type == bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    assert kind.location.type == bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    fd = bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    assert kind.requestedHandleTypes == fd
    assert given["cuMemExportToShareableHandle"] == (77, fd, 0)
    assert given["cuMemImportFromShareableHandle"] == (5, fd)
    assert given["cuMemMap"] == (1 << 40, 4 << 20, 0, 77, 0)
    address, nbytes, (access,), count = given["cuMemSetAccess"]
    assert (address, nbytes, count, access.location.id) == (1 << 40, 4 << 20, 1, 3)
    assert access.flags == bindings.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    assert given["cuMemAddressReserve"] == (1 << 38, 2 << 20, 0, 0)
    assert given["cuMemAddressFree"] == (1 << 40, 1 << 38)
    assert given["cuMemRelease"] == (77,)


def test_fabric_handles_are_bytes(recorded):
    exported = bindings.CUmemFabricHandle()
    exported.data = bytes(range(64))
    recorded.answers = {
        "cuMemCreate": (bindings.CUmemGenericAllocationHandle(77),),
        "cuMemExportToShareableHandle": (exported,),
        "cuMemImportFromShareableHandle": (bindings.CUmemGenericAllocationHandle(78),),
        "cuMulticastCreate": (bindings.CUmemGenericAllocationHandle(9),),
    }
    driver = CudaDriver(rank=1)
    driver.fabric = True
    assert driver.create(3, 4 << 20) == 77
    assert driver.export(77) == bytes(range(64))
    assert driver.import_memory(bytes(range(64))) == 78
    assert driver.multicast_create(4, 1 << 30) == 9
    given, fabric = dict(recorded.calls), bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    assert given["cuMemCreate"][1].requestedHandleTypes == fabric
    assert given["cuMemExportToShareableHandle"] == (77, fabric, 0)
    assert given["cuMemImportFromShareableHandle"] == (bytes(range(64)), fabric)
    assert given["cuMulticastCreate"][0].handleTypes == int(fabric)


def test_the_bindings_take_a_fabric_handle_as_bytes():
    """The bindings refuse a wrong type before they look for the driver library, which may be missing here."""
    fabric = bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
    with pytest.raises(TypeError):
        bindings.cuMemImportFromShareableHandle("text", fabric)
    with contextlib.suppress(RuntimeError):
        code, _ = bindings.cuMemImportFromShareableHandle(bytes(64), fabric)
        assert int(code) != 0


@pytest.mark.parametrize(
    ("state", "status", "cluster", "domain"),
    [
        (3, 0, list(range(16)), "000102030405060708090a0b0c0d0e0f/7"),
        (3, 0, [0] * 16, ""),  # NVSwitches of one host
        (2, 0, list(range(16)), ""),  # the fabric manager has not finished
        (3, 999, list(range(16)), ""),  # the fabric manager has failed
    ],
)
def test_the_nvlink_domain_comes_from_nvml(recorded, monkeypatch, state, status, cluster, domain):
    recorded.answers = {"cuDeviceGetUuid": (bindings.CUuuid(),)}
    given = []

    def ask(call, *args):
        given.append((call, args))
        if call != "device_get_gpu_fabric_info_v":
            return "handle"
        info = pytest.importorskip("cuda.bindings.nvml").GpuFabricInfo_v3()
        info.state, info.status, info.clique_id = state, status, 7
        info.cluster_uuid = np.array(cluster, dtype=np.uint8)
        return info

    monkeypatch.setattr(nvml, "ask", ask)
    assert CudaDriver(rank=0).domain(3) == domain
    assert given == [
        ("device_get_handle_by_uuid", ("GPU-00000000-0000-0000-0000-000000000000",)),
        ("device_get_gpu_fabric_info_v", ("handle",)),
    ]


def test_without_nvml_there_is_no_domain(monkeypatch):
    monkeypatch.setattr(nvml, "ask", lambda call, *args: None)
    assert nvml.domain("0" * 32) == ""
    assert nvml.nvlinks("0" * 32) is None


def test_every_attribute_that_is_asked_for_exists(recorded):
    recorded.answers = {"cuDeviceGetAttribute": (1,), "cuDeviceGetP2PAttribute": (1,)}
    driver = CudaDriver(rank=0)
    for name in DEFAULTS:
        assert driver.attribute(0, name) == 1
    for name in ("ACCESS_SUPPORTED", "NATIVE_ATOMIC_SUPPORTED"):
        assert driver.p2p(0, 1, name) == 1
    assert recorded.calls[-1][1][1:] == (0, 1)


def test_multicast_objects(recorded):
    recorded.answers = {
        "cuMulticastCreate": (bindings.CUmemGenericAllocationHandle(9),),
        "cuMulticastGetGranularity": (2 << 20,),
    }
    driver = CudaDriver(rank=0)
    assert driver.multicast_granularity(4, 1 << 30) == 2 << 20
    assert driver.multicast_create(4, 1 << 30) == 9
    driver.multicast_add(9, 2)
    driver.multicast_bind(9, 1 << 21, 77, 4 << 20)
    driver.multicast_unbind(9, 2, 1 << 21, 4 << 20)
    given = dict(recorded.calls)
    (prop,) = given["cuMulticastCreate"]
    assert (prop.numDevices, prop.size, prop.flags) == (4, 1 << 30, 0)
    assert prop.handleTypes == int(bindings.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
    assert given["cuMulticastBindMem"] == (9, 1 << 21, 77, 0, 4 << 20, 0)
    assert given["cuMulticastUnbind"] == (9, 2, 1 << 21, 4 << 20)


def test_a_failure_names_rank_call_code_and_remedy(recorded):
    driver = CudaDriver(rank=3)
    recorded.code = bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(DriverError) as caught:
        driver.create(0, 1 << 30)
    assert str(caught.value) == (
        "rank 3: cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2): free memory on this GPU, or lower heap= or PKT_HEAP"
    )
    assert caught.value.code == 2


def test_hold_waits_for_a_word_of_at_least_a_value(recorded):
    CudaDriver(rank=1).hold(1 << 40, 7, 52)
    assert bindings.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ == 0, "it compares by the sign of the difference"
    assert recorded.calls.pop() == ("cuStreamWaitValue32", (52, 1 << 40, 7, 0))


def test_a_copy_is_one_call(recorded):
    driver = CudaDriver(rank=1)
    driver.copy(1 << 40, 1 << 30, (1, 1, 3 << 30), (9, 9), (9, 9), 52)
    assert recorded.calls.pop() == ("cuMemcpyDtoDAsync", (1 << 40, 1 << 30, 3 << 30, 52))
    for planes, heights in ((1, (4, 4)), (3, (8, 5))):
        driver.copy(1 << 40, 1 << 30, (planes, 4, 96), (128, 128 * 8), (100, 100 * 5), 52)
        name, (box, stream) = recorded.calls.pop()
        assert (name, stream) == ("cuMemcpy3DAsync", 52)
        assert (int(box.dstDevice), box.dstPitch, box.dstHeight) == (1 << 40, 128, heights[0])
        assert (int(box.srcDevice), box.srcPitch, box.srcHeight) == (1 << 30, 100, heights[1])
        assert (box.Depth, box.Height, box.WidthInBytes) == (planes, 4, 96)
        assert box.srcMemoryType == box.dstMemoryType == bindings.CUmemorytype.CU_MEMORYTYPE_UNIFIED
    assert len(recorded.calls) == 1, "only cuInit is left"


@pytest.mark.gpu
def test_a_view_is_the_memory_at_that_address():
    source = torch.arange(64, dtype=torch.uint8, device="cuda")
    view = CudaDriver(rank=0).view(source.data_ptr() + 16, 32, torch.cuda.current_device())
    assert view.tolist() == list(range(16, 48))
    assert view.untyped_storage().data_ptr() == source.data_ptr() + 16
    view.zero_()
    assert source[16:48].count_nonzero() == 0


class Capture:
    """torch.cuda.CUDAGraph, which writes down its calls among those of the driver."""

    calls: list = []
    broken = False

    def __init__(self, keep_graph):
        assert keep_graph

    def capture_begin(self, pool, capture_error_mode):
        self.calls.append(("begin", (pool, capture_error_mode)))

    def capture_end(self):
        self.calls.append(("end", ()))
        if self.broken:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")

    def raw_cuda_graph(self):
        return 8

    def pool(self):
        return (0, 1)


@pytest.fixture
def captured(recorded, monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Capture)
    monkeypatch.setattr(Capture, "calls", recorded.calls)
    return recorded


def test_what_is_recorded_becomes_one_call(captured):
    driver, modes = CudaDriver(rank=1), bindings.CUstreamCaptureMode
    captured.answers = {
        "cuGraphInstantiate": (bindings.CUgraphExec(9),),
        "cuThreadExchangeStreamCaptureMode": (modes.CU_STREAM_CAPTURE_MODE_GLOBAL,),
    }
    captured.calls.clear()
    assert driver.record(lambda: driver.copy(1 << 40, 1 << 30, (1, 1, 64), (9, 9), (9, 9), 52)) == 9
    driver.replay(9, 53)
    driver.forget(9)
    (name, (graph, flags)) = captured.calls.pop(3)
    assert (name, int(graph), flags) == ("cuGraphInstantiate", 8, 1 | 8)
    assert captured.calls == [
        ("begin", (None, "relaxed")),
        ("cuMemcpyDtoDAsync", (1 << 40, 1 << 30, 64, 52)),
        ("end", ()),
        ("cuGraphLaunch", (9, 53)),
        ("cuThreadExchangeStreamCaptureMode", (modes.CU_STREAM_CAPTURE_MODE_RELAXED,)),
        ("cuGraphExecDestroy", (9,)),
        ("cuThreadExchangeStreamCaptureMode", (modes.CU_STREAM_CAPTURE_MODE_GLOBAL,)),
    ]
    captured.calls.clear()
    driver.record(lambda: None)
    assert captured.calls[0] == ("begin", ((0, 1), "relaxed")), "in the memory of the first one, which lasts"


@pytest.mark.parametrize("broken", [False, True])
def test_an_error_ends_the_recording(captured, monkeypatch, broken):
    driver = CudaDriver(rank=1)
    monkeypatch.setattr(Capture, "broken", broken)
    captured.calls.clear()
    with pytest.raises(ZeroDivisionError):
        driver.record(lambda: 1 // 0)
    assert [name for name, _ in captured.calls] == ["begin", "end"]


def test_a_stream_is_lent_again_and_never_destroyed(recorded, monkeypatch):
    """torch's allocator may name a stream when it frees memory after the world that used it has closed."""
    monkeypatch.setattr(gpu_driver, "_returned", defaultdict(list))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    recorded.answers = {"cuStreamCreate": (bindings.CUstream(6),)}
    driver = CudaDriver(rank=1)
    recorded.calls.clear()
    stream = driver.lend_stream(0)
    driver.return_stream(0, stream)
    assert driver.lend_stream(0) == stream
    recorded.answers = {"cuStreamCreate": (bindings.CUstream(7),)}
    assert driver.lend_stream(0) == 7
    assert driver.lend_stream(1) == 7  # a stream belongs to a device
    assert recorded.calls == [("cuStreamCreate", (1,))] * 3


class _Stream:
    """As torch's streams on GPUs, of which no weak reference tells the end: here nothing can have one."""

    __slots__ = ("__dict__", "handle")

    def __init__(self, handle, device):
        self.handle = handle


def test_a_stream_is_given_back_with_its_object(recorded, monkeypatch):
    monkeypatch.setattr(gpu_driver, "_returned", defaultdict(list))
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "ExternalStream", _Stream)
    recorded.answers = {"cuStreamCreate": (bindings.CUstream(6),)}
    engines = Engines(CudaDriver(rank=1), 0)
    stream = engines.stream()
    assert (stream.handle, gpu_driver._returned[0]) == (6, [])
    del stream
    assert gpu_driver._returned[0] == [6]


def test_words_are_written_on_a_stream_of_their_own(recorded, monkeypatch):
    """torch's streams and copies would leave traces in a graph that somebody records meanwhile."""
    modes, empty = bindings.CUstreamCaptureMode, torch.empty
    monkeypatch.setattr(gpu_driver, "_sides", {})
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory, **named: empty(*shape, **named))
    recorded.answers = {
        "cuCtxGetCurrent": (bindings.CUcontext(5),),
        "cuStreamCreate": (bindings.CUstream(6),),
        "cuThreadExchangeStreamCaptureMode": (modes.CU_STREAM_CAPTURE_MODE_GLOBAL,),
    }
    CudaDriver(rank=1).write_words(1 << 40, [7, -8], 3)
    page = gpu_driver._sides[3][2]
    assert page[:2].tolist() == [7, -8]
    written = [
        ("cuCtxPushCurrent", (5,)),
        ("cuThreadExchangeStreamCaptureMode", (modes.CU_STREAM_CAPTURE_MODE_RELAXED,)),
        ("cuMemcpyHtoDAsync", (1 << 40, page.data_ptr(), 8, 6)),
        ("cuStreamSynchronize", (6,)),
        ("cuThreadExchangeStreamCaptureMode", (modes.CU_STREAM_CAPTURE_MODE_GLOBAL,)),
        ("cuCtxPopCurrent", ()),
    ]
    assert recorded.calls == [("cuInit", (0,)), ("cuCtxGetCurrent", ()), ("cuStreamCreate", (1,)), *written]
    driver = CudaDriver(rank=1)
    recorded.calls.clear()
    driver.write_words(1 << 40, [7, -8], 3)
    assert recorded.calls == written, "the next driver of the process uses the same stream and page"
