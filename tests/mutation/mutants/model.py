"""Mistakes of the model."""

from tests.mutation.mutant import MODEL, Mutant, of

MUTANTS: tuple[Mutant, ...] = (
    *of(MODEL + "cost.py", "tests/tune/test_model.py",
        ("the parts of a time are added", "longest = max(self.compute, self.memory, self.communication)",
         "longest = self.compute + self.memory + self.communication"),
        ("a wave too few", "middle = (low + high) // 2\n            low, high = (low, middle) if done(start + middle * task_seconds) >= tasks",
         "middle = (low + high) // 2\n            low, high = (low, middle) if done(start + middle * task_seconds) + 1 >= tasks"),
    ),
    *of(MODEL + "gpu.py", "tests/tune/test_model.py",
        ("lines are straight between rates", "return float(y0 * (y1 / y0) ** (math.log(x / x0) / math.log(x1 / x0)))",
         "return float(y0 + (y1 - y0) * (x - x0) / (x1 - x0))"),
        ("half a block in flight counts as half", "_DEPTH = math.log2(1.5)", "_DEPTH = 1.0"),
    ),
    *of(MODEL + "calibration.py", "tests/tune/test_calibration.py -k 'distances or doubling or correction or collective or not_known'",
        ("ranks count like N", 'RANKS * doublings(key["size"], size)', 'doublings(key["size"], size)'),
        ("rows outside the measured ones do not count", 'rows = doublings(key["M"], min(max(key["M"], least), most))',
         "rows = 0.0"),
    ),
    *of(MODEL + "config.py", "tests/tune/test_config.py",
        ("1 and True are one setting", "return self._text == other._text if isinstance",
         "return self._settings == other._settings if isinstance"),
        ("the order of settings counts", "self._text = json.dumps(kept, sort_keys=True)", "self._text = json.dumps(kept)"),
    ),
    *of(MODEL + "rates.py", "tests/test_doctor.py -k rates",
        ("rates of other GPUs are lost", '"gpus": {**_read(), name: dict(rates)}}', '"gpus": {name: dict(rates)}}'),
        ("H200 is measured again", "if rates is None or gpu.measured:", "if rates is None:"),
    ),
)  # fmt: skip
