"""The distributed tuner: finds the fastest config of a kernel or an operator, and cannot desynchronise the ranks.

In the order data flows: `config` (candidates, and spaces of them), `target` (what is tuned, and a call of it),
`compiling` (what it launches, compiled before), `spread` (in which order candidates are tried), `votes` (the steps that
ranks take together), `timers` (how a time is taken), `search` (which are measured, how often), `cache` (what earlier
runs found), `tuner` (tune and choice), `autotune` (the decorator), `bench` (do_bench for Triton's own).

Of pkt's operators: `gpu` and `model` (what a config will take), `spaces` (operator_space: the candidates), `tables`
(what was measured and ships), `command` (`pkt tune`). What is seen: `report` (a search as a table), `picture` (draw),
`explanation` (explain: what an operator takes, and why).
"""

from pkt.tune.autotune import Autotuned, autotune
from pkt.tune.bench import do_bench
from pkt.tune.config import Config, space
from pkt.tune.explanation import explain
from pkt.tune.search import Candidate, Model, Search
from pkt.tune.spaces import operator_space
from pkt.tune.timers import RecordedTimer, Timer, timer_of
from pkt.tune.tuner import choice, tune

__all__ = [
    "Config",
    "space",
    "autotune",
    "Autotuned",
    "tune",
    "choice",
    "explain",
    "operator_space",
    "do_bench",
    "Search",
    "Candidate",
    "Model",
    "Timer",
    "RecordedTimer",
    "timer_of",
]
