"""One function for each property that must hold of an operator; each raises AssertionError where it does not."""

from .compilation import check_compilation, floats
from .gradients import all_right_gradients, check_autograd, check_compiled, check_gradients, check_saved
from .operands import given, result_for
from .planned import check_capture, check_graph_pool, check_host_cost, check_workspace
from .protocol import check_exploration, check_wrap, explored, name_of, set_launches
from .refusals import check_agreement, check_overlap, check_refusals
from .results import check_empty, check_results, check_results_of_uneven_ranks, check_teams

__all__ = [
    "all_right_gradients",
    "check_agreement",
    "check_autograd",
    "check_capture",
    "check_compilation",
    "check_compiled",
    "check_empty",
    "check_exploration",
    "check_gradients",
    "check_graph_pool",
    "check_host_cost",
    "check_overlap",
    "check_refusals",
    "check_results",
    "check_results_of_uneven_ranks",
    "check_saved",
    "check_teams",
    "check_workspace",
    "check_wrap",
    "explored",
    "floats",
    "given",
    "name_of",
    "result_for",
    "set_launches",
]
