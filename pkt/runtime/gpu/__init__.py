"""The Backend on GPUs: `cuda`, over `driver`, `nvml`, `topology` (can these GPUs work together), `votes` (steps that
succeed on all ranks or on none) and `multicast`; `watch`, the deadlines of waits."""
