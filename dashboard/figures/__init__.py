"""The figures of the dashboard and of ``gockpt report``: from rows to Plotly objects.

Pure functions, without a server or a database. Each takes ``theme`` (``light`` or ``dark``) and
``emulated``, the name of the profile if times were modelled, which the figure then says. With
nothing to draw they give a figure that says why. How they all look: :mod:`.look`.
"""

from gockpt.dashboard.figures.compare import Compared, Difference, compare
from gockpt.dashboard.figures.costs import costs
from gockpt.dashboard.figures.curves import Curve, goodput
from gockpt.dashboard.figures.lanes import LANES, of_checkpoint
from gockpt.dashboard.figures.look import CONFIG, TEMPLATES, Theme, emulated_note, strategy_colour
from gockpt.dashboard.figures.plan import Prediction, plan
from gockpt.dashboard.figures.recovery import recovery_matrix, recovery_split
from gockpt.dashboard.figures.stall import stall
from gockpt.dashboard.figures.steps import steps
from gockpt.dashboard.figures.throughput import throughput
from gockpt.dashboard.figures.timeline import timeline
from gockpt.dashboard.figures.trend import Limit, Point, trend

__all__ = [
    "CONFIG",
    "LANES",
    "TEMPLATES",
    "Compared",
    "Curve",
    "Difference",
    "Limit",
    "Point",
    "Prediction",
    "Theme",
    "compare",
    "costs",
    "emulated_note",
    "goodput",
    "of_checkpoint",
    "plan",
    "recovery_matrix",
    "recovery_split",
    "stall",
    "steps",
    "strategy_colour",
    "throughput",
    "timeline",
    "trend",
]
