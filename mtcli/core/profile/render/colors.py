"""Colours of kinds of time and memory: told apart by colour-blind readers, on light and dark.

Blue, orange and the rest are of Okabe and Ito's set (jfly.uni-koeln.de/color), with greys for idle.
"""

BLUE, ORANGE, GREEN, PINK = "#4c78a8", "#f58518", "#009e73", "#cc79a7"
YELLOW, SKY, LIGHT, DARK = "#e6c229", "#56b4e9", "#bab0ac", "#7a7a7a"

TIME = {
    "forward": BLUE,
    "backward": ORANGE,
    "communication": PINK,
    "bubble": LIGHT,
    "optimizer": GREEN,
    "data": YELLOW,
    "other": DARK,
}
MEMORY = {
    "weights": BLUE,
    "gradients": ORANGE,
    "optimizer": GREEN,
    "activations": PINK,
    "temporary": YELLOW,
    "other": LIGHT,
}
GRID = "rgba(128, 128, 128, 0.25)"
HEAT = ((0.0, "rgba(128, 128, 128, 0.12)"), (1e-9, "#fde8a9"), (0.5, "#e6862a"), (1.0, "#7a1f10"))
PLACES = ((0.0, "#cfe1f2"), (1.0, "#7fb0db"))  # dark text is read on all of them
