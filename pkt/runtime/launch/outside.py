"""The errors where Triton finds no GPU: of a kernel that is launched outside a world, and of host code in a simulation
that asks Triton's driver."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from pkt.errors import Unsupported

_made: list[Callable[[], Any]] = []  # what `name_the_remedy` put in place


def name_the_remedy() -> None:
    """Let Triton raise Unsupported, with a remedy, where it finds no GPU for a launch. Nothing of pkt runs in a launch
    outside a world, so Triton itself has to. Its own error is a RuntimeError, and Unsupported is one, too."""
    module: Any = sys.modules.get("triton.runtime.driver")
    create = getattr(module, "_create_driver", None)  # private to Triton: another release may not have it
    if create is None or create in _made:
        return

    def create_driver() -> Any:
        try:
            return create()
        except RuntimeError as error:
            if not str(error).startswith("0 active drivers"):
                raise
            from pkt.runtime import world as worlds  # here, because it imports this package

            if worlds._current() is not None:  # of the simulator, whose launches do not come here
                remedy = (
                    "take the device from world.torch_device; the simulator has no target, streams or measured times"
                )
                raise Unsupported.here("Triton's driver", "found no GPU", remedy) from error
            raise Unsupported.no_gpu("Triton", "found no GPU, and no world around this launch of a kernel") from error

    _made.append(create_driver)
    module._create_driver = create_driver
