"""The Backend on GPUs: `cuda` over `driver`, `multicast`, `topology`, `nvml` and `handles`; `watch`, the deadlines."""
