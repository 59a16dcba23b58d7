"""The distributed tuner: finds the fastest config of a kernel or an operator, and cannot desynchronise the ranks.

In the order of the data flow: `pkt.model.config` (candidates, and spaces of them), `target` (what is tuned, and a call
of it), `compiling` (compiles it beforehand), `spread` (the order in which candidates are tried), `votes` (steps that
ranks take together), `timers` (take a time), `search` (which candidates are measured, and how often), `cache` (choices
of earlier runs), `tuner` (tune and choice), `autotune` (the decorator), `bench` (do_bench for Triton's own tuner).

Of pkt's operators, which it finds in their registry: `candidates` (spaces and predicted times), `tables` (measurements
that ship), `command` (`pkt tune`). For people: `report` (a search as a table), `explanation` (explain: which
settings an operator takes, and why), `prediction` (predict: seconds over many nodes), `across` (explain and search over
nodes).
"""

from pkt.model.config import Config, space
from pkt.tune.autotune import Autotuned, autotune
from pkt.tune.bench import do_bench
from pkt.tune.candidates import operator_space
from pkt.tune.explanation import explain
from pkt.tune.prediction import Prediction, predict
from pkt.tune.search import Candidate, Model, Search
from pkt.tune.timers import RecordedTimer, Timer, timer_of
from pkt.tune.tuner import choice, tune

__all__ = [
    "Config", "space", "autotune", "Autotuned", "tune", "choice", "explain", "operator_space", "do_bench", "predict",
    "Prediction",
    "Search", "Candidate", "Model", "Timer", "RecordedTimer", "timer_of",
]  # fmt: skip
