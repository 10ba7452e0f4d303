"""The pictures of a sweep. Only points whose gradients are right, or were not checked, are drawn."""

from pipebench.record import one_line_errors
from pipebench.report.content import Content
from pipebench.report.figures.canvas import Picture
from pipebench.report.figures.comparison import schedules_picture
from pipebench.report.figures.drift import drift_picture
from pipebench.report.figures.ledger import ledger_picture
from pipebench.report.figures.lines import bubble_picture, throughput_picture
from pipebench.report.figures.loss import loss_picture
from pipebench.report.figures.memory import memory_picture
from pipebench.report.figures.recompute import recompute_picture
from pipebench.report.figures.rendering import rendered, themed_svg

__all__ = ["Picture", "pictures_of", "rendered", "themed_svg"]

_OF_TRAINING = (loss_picture, drift_picture)
_OF_ROWS = (schedules_picture, bubble_picture, throughput_picture, ledger_picture, memory_picture, recompute_picture)


def pictures_of(content: Content) -> list[Picture]:
    """Return every picture for which something was measured; raise ResultError for what cannot be drawn."""
    with one_line_errors(content.name):
        drawn = [picture(content.rows) for picture in _OF_ROWS]
        drawn += [picture(content.points) for picture in _OF_TRAINING]
        return [picture for picture in drawn if picture is not None]
