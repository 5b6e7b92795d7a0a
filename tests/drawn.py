"""What a chart has drawn, read from matplotlib's axes: boxes by their tips, lines and texts."""

from matplotlib.figure import Figure

from mtcli.core.profile.render.drawing import TIP


def axes_of(chart):
    axes = Figure().add_subplot()
    chart.draw(axes)
    return axes


def boxes_of(chart):
    """[(label of its kind, tip, left, lower, width, height)] of a chart, in order."""
    return [
        (drawn.get_label(), url.removeprefix(TIP), *path.get_extents().bounds)
        for drawn in axes_of(chart).collections
        if drawn.get_urls()[0]
        for path, url in zip(drawn.get_paths(), drawn.get_urls(), strict=True)
    ]


def names_of(axis):
    return [tick.get_text() for tick in axis.get_ticklabels()]
