"""Progress of a loop: a bar on a terminal, plain lines in a log."""

import logging
import math
import sys
import time

_logger = logging.getLogger(__name__)

WIDTH = 24
PATIENCE = 60  # seconds after which there is a line in any case


class Progress:
    """Shows how far a loop is, and how fast.

    Args:
        title: What the loop does.
        total: Steps.
        interval: Steps between lines in a log.
        enabled: Whether to show anything.
    """

    def __init__(self, title: str, total: int, interval: int, enabled: bool) -> None:
        self.title, self.total, self.interval, self.enabled = title, total, max(interval, 1), enabled
        self.bar = enabled and sys.stderr.isatty()
        self.images = self.lines = 0
        self.start = self.shown = time.perf_counter()

    @property
    def rate(self) -> float:
        """Images per second so far."""
        return self.images / max(time.perf_counter() - self.start, 1e-9)

    def show(self, step: int, images: int, **values: float) -> None:
        """Count ``images`` and show ``step`` of the loop, with values such as the loss."""
        self.images += images
        if not self.enabled:
            return
        time_to_draw = time.perf_counter() - self.shown > 0.1 or step == self.total
        if self.bar and time_to_draw:
            self.shown = time.perf_counter()
            filled = WIDTH * step // self.total
            bar = "#" * filled + "." * (WIDTH - filled)
            sys.stderr.write(f"\r\033[K{self.title} [{bar}] {self.text(step, values)}")
            sys.stderr.flush()
        elif not self.bar and (step // self.interval > self.lines or time.perf_counter() - self.shown > PATIENCE):
            self.lines, self.shown = step // self.interval, time.perf_counter()
            _logger.info("%s: %s", self.title, self.text(step, values))

    def close(self) -> None:
        """Take the bar away."""
        if self.bar:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def text(self, step: int, values: dict[str, float]) -> str:
        """What is shown of a step."""
        numbers = "".join(f", {name} {value:.3g}" for name, value in values.items() if not math.isnan(value))
        return f"{step}/{self.total}, {self.rate:.0f} img/s{numbers}"
