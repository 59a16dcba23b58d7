"""Queries that NVML answers and the CUDA driver does not: NVLinks that are up, the NVLink domain over several hosts."""

from __future__ import annotations

from typing import Any

NVLINKS = 18  # most that a GPU has
_COMPLETED = 3  # nvmlGpuFabricState: the fabric manager has placed this GPU in its domain


def ask(call: str, *args: Any) -> Any:
    """The result of one of NVML's functions; None if NVML cannot answer."""
    try:
        from cuda.bindings import nvml
    except ImportError:  # an older cuda-python
        return None
    try:
        nvml.init_v2()
        return getattr(nvml, call)(*args)  # by name, because an older library may lack the function
    except (nvml.NvmlError, RuntimeError, AttributeError):  # not supported; no library; no such function in it
        return None


def _handle(uuid: str) -> Any:
    """NVML's handle of the GPU with the driver's `uuid`, 32 hexadecimal digits; None if NVML does not know it."""
    groups = (uuid[:8], uuid[8:12], uuid[12:16], uuid[16:20], uuid[20:])
    return ask("device_get_handle_by_uuid", "GPU-" + "-".join(groups))


def nvlinks(uuid: str) -> int | None:
    """The number of a GPU's NVLinks that are up; None if NVML cannot say."""
    handle = _handle(uuid)
    if handle is None:
        return None
    # NVML also raises for a link that the GPU does not have.
    states = [ask("device_get_nvlink_state", handle, link) for link in range(NVLINKS)]
    return sum(int(state) == 1 for state in states if state is not None)


def domain(uuid: str) -> str:
    """The NVLink domain of a GPU as "cluster/clique"; "" if it is in none that spans hosts, or NVML cannot say."""
    handle = _handle(uuid)
    info = None if handle is None else ask("device_get_gpu_fabric_info_v", handle)
    if info is None or int(info.state) != _COMPLETED or int(info.status) != 0:
        return ""
    cluster = bytes(bytearray(info.cluster_uuid)).hex()
    return f"{cluster}/{int(info.clique_id)}" if cluster.strip("0") else ""  # zeros: a domain within one host
