"""Mistakes of the doctor, timelines, the launcher."""

from tests.mutation.mutant import Mutant, of

MUTANTS: tuple[Mutant, ...] = (
    *of("pkt/doctor.py", "tests/test_doctor.py -k 'not on_gpus and not compile'",
        ("a note is fatal", "self.ranks > 0 and not any(problem.fatal for problem in self.problems)",
         "self.ranks > 0 and not self.problems"),
        ("the trial sends to itself", "there = dst.peer((rank + 1) % size)", "there = dst.peer(rank)"),
    ),
    *of("pkt/trace.py", "tests/test_trace.py",
        ("the event that began first holds the lane", "            event = open_[-1]\n", "            event = open_[0]\n"),
        ("stretches that touch are two", "if merged and start <= merged[-1][1]:", "if merged and start < merged[-1][0]:"),
    ),
    *of("pkt/runtime/world.py", "tests/runtime/test_launcher.py tests/runtime/test_world.py",
        ("True is a number of ranks", "if isinstance(value, bool) or not isinstance(value, int) or value < 1:",
         "if not isinstance(value, int) or value < 1:"),
        ("no ranks are enough", "not isinstance(value, int) or value < 1:", "not isinstance(value, int) or value < 0:"),
    ),
    *of("pkt/layouts.py", "tests/test_layout.py tests/language/test_tile.py",
        ("rows of half runs go by TMA", "even = x.data_ptr() % 16 == 0 and (c * x.element_size()) % 16 == 0",
         "even = x.data_ptr() % 16 == 0"),
        ("missing dimensions are on the right", "b, d, r, c = (1,) * (4 - x.ndim) + tuple(x.shape)",
         "b, d, r, c = tuple(x.shape) + (1,) * (4 - x.ndim)"),
    ),
    *of("pkt/layouts.py", "tests/simulate/test_semantics_tile.py tests/kernels/test_swiglu.py -k 'interleave or tiles or does_not_fit'",
        ("gate and up lie behind each other", "return torch.stack((gate, up), dim=-1).flatten(-2)",
         "return torch.stack((gate, up), dim=-2).flatten(-2)"),
    ),
)  # fmt: skip
