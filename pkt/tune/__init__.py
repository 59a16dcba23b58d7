"""The distributed tuner: finds the fastest config of a kernel or an operator, and cannot desynchronise the ranks.

In the order data flows: `config` (candidates, and spaces of them), `target` (what is tuned, and a call of it),
`compiling` (what it launches, compiled before), `spread` (in which order candidates are tried), `votes` (the steps that
ranks take together), `timers` (how a time is taken), `search` (which are measured, how often), `cache` (what earlier
runs found), `tuner` (tune and choice), `autotune` (the decorator), `bench` (do_bench for Triton's own).
"""

from pkt.tune.autotune import Autotuned, autotune
from pkt.tune.bench import do_bench
from pkt.tune.config import Config, space
from pkt.tune.search import Candidate, Model, Search
from pkt.tune.timers import RecordedTimer, Timer, timer_of
from pkt.tune.tuner import choice, tune

__all__ = [
    "Config",
    "space",
    "autotune",
    "Autotuned",
    "tune",
    "choice",
    "do_bench",
    "Search",
    "Candidate",
    "Model",
    "Timer",
    "RecordedTimer",
    "timer_of",
]
