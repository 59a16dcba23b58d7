"""The modelled clock of the timeline: the time that an access or a product of one program takes on an H200.

It is a model for pictures, not a prediction: programs do not compete for links and memory. The rates are those measured
on a 4 x H200 host (docs/facts.md), divided by the number of programs that share them.
"""

LOCAL_BYTES_PER_US = 4.2e6 / 132  # 4.2 TB/s over 132 SMs
REMOTE_BYTES_PER_US = 349e3 / 8  # 349 GB/s with 8 programs, before the link is full
FLOPS_PER_US = 790e6 / 132  # 790 TFLOP/s over 132 SMs
SIGNAL_US = 1.37  # one way between two GPUs
LOCAL_SIGNAL_US = 0.97  # one way inside a GPU
FAR_US = 5.0  # one way to another node: assumed
FAR_BYTES_PER_US = 50e3  # 400 Gb/s, the link of one rank: assumed
STEP_US = 0.3  # latency of an access that moves a few bytes: assumed
LAUNCH_US = 5.0  # assumed
