"""The operators of a checkout, where `kernels/` lies beside `pkt/`. In a wheel `pkt/kernels/` hides this file."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[1] / "kernels")]
