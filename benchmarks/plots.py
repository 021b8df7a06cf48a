"""The pictures of the comparison, drawn with matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soft_models.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vP*Xdph<>"
COLOURS = (0, 1, 2, 4, 5, 9, 3, 6, 8)  # of matplotlib's tab10; its grey is left to the peers
EMPHASIS = "soft"  # drawn thicker
Series = Mapping[str, Sequence[tuple[float, ...]]]


def require_matplotlib() -> None:
    """Refuse early what could not be drawn after minutes of measuring.

    Raises:
        UsageError: matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise UsageError("the plots need matplotlib: pip install matplotlib") from None


def new_figure(title: str, panels: int) -> "tuple[Figure, list[Axes]]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * panels + 2.6, 4.6), dpi=110, layout="constrained")
    figure.suptitle(title, fontsize=11)
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for ax in axes:
        ax.grid(True, which="major", alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def style(names: Sequence[str], peers: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
    """Colour and marker by name; peers are grey and dashed."""
    from matplotlib import colormaps

    own = [name for name in names if name not in peers]
    styles: dict[str, dict[str, Any]] = {}
    for i, name in enumerate(own):
        colour = "black" if i >= len(COLOURS) else colormaps["tab10"](COLOURS[i])
        styles[name] = {"color": colour, "marker": MARKERS[i], "lw": 2.6 if name == EMPHASIS else 1.3, "ms": 5}
    for i, name in enumerate(peers):
        styles[name] = {"color": str(0.3 + 0.2 * i), "marker": MARKERS[-1 - i], "ls": "--", "lw": 1.2, "ms": 5}
    return styles


def save(figure: "Figure", axes: "Sequence[Axes]", path: Path, legend: str | None = None) -> None:
    """With one legend for all panels, titled ``legend``, at the right."""
    handles: dict[str, Any] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        list(handles.values()), list(handles), loc="outside right center", fontsize=8.5, frameon=False,
        title=legend, title_fontsize=8.5, alignment="left",
    )  # fmt: skip
    figure.savefig(path)


def label_ticks(ax: "Axes", values: Sequence[float], log_y: bool = True) -> None:
    """Tick the measured values and no others along x; plain numbers along a logarithmic y."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    ax.xaxis.set_major_locator(FixedLocator(values))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(values, [f"{value:,.0f}" for value in values], fontsize=8.5)
    if log_y:
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter("{x:g}")


def plot_throughput(kinds: Mapping[str, Series], peers: Sequence[str], subtitle: str, path: Path) -> None:
    """Images per second against image size, one panel for each kind of step.

    Args:
        kinds: By kind, by model: (pixels per side, lower quartile, median, upper quartile).
        peers: Names among them that are not ours.
        subtitle: Machine and date.
        path: PNG to write.
    """
    figure, axes = new_figure(f"Throughput\n{subtitle}", len(kinds))
    for ax, (kind, series) in zip(axes, kinds.items(), strict=True):
        for name, look in style(list(series), peers).items():
            sizes, low, middle, high = (list(column) for column in zip(*series[name], strict=True))
            errors = [
                [m - a for a, m in zip(low, middle, strict=True)],
                [b - m for m, b in zip(middle, high, strict=True)],
            ]
            ax.errorbar(sizes, middle, errors, label=name, elinewidth=1, **look)
        ax.set(xscale="log", yscale="log", title=kind.capitalize(), xlabel="image side (pixels)", ylabel="images / s")
        label_ticks(ax, sorted({point[0] for points in series.values() for point in points}))
    save(figure, axes, path)


def plot_growth(
    costs: Mapping[str, Series], exponents: Mapping[str, Mapping[str, float]], subtitle: str, path: Path
) -> None:
    """Cost of one attention layer against its tokens on log axes, with the fitted exponents in the legend.

    Args:
        costs: By axis label, by attention: (tokens, cost).
        exponents: By axis label, in the same order, by attention.
        subtitle: Layer, machine and date.
        path: PNG to write.
    """
    figure, axes = new_figure(f"One attention layer against tokens\n{subtitle}", len(costs))
    names = list(dict.fromkeys(name for series in costs.values() for name in series))
    labels = {
        name: f"{name}: " + ", ".join(f"{found[name]:.2f}" if name in found else "-" for found in exponents.values())
        for name in names
    }
    for ax, (axis, series) in zip(axes, costs.items(), strict=True):
        for name, look in style(names).items():
            if name in series:
                ax.plot(*zip(*series[name], strict=True), label=labels[name], **look)
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel=axis)
        label_ticks(ax, sorted({1024 * 4**i for i in range(6)} & {point[0] for s in series.values() for point in s}))
    save(figure, axes, path, "attention: exponent of N\nin time, in memory")


def plot_accuracy(series: Series, trained_at: int, subtitle: str, path: Path) -> None:
    """Top-1 against the image size at evaluation.

    Args:
        series: By attention: (pixels per side, mean, standard deviation), in percent.
        trained_at: Pixels per side in training.
        subtitle: data, recipe, seeds.
        path: PNG to write.
    """
    figure, axes = new_figure(f"Digits: trained at {trained_at} px, evaluated at other sizes\n{subtitle}", 1)
    for name, look in style(list(series)).items():
        sizes, mean, deviation = (list(column) for column in zip(*series[name], strict=True))
        axes[0].errorbar(sizes, mean, deviation, label=name, elinewidth=1, capsize=2, **look)
    axes[0].axvline(trained_at, color="0.6", lw=1, ls=":")
    axes[0].set(xscale="log", xlabel="image side at evaluation (pixels)", ylabel="top-1 (%), mean and sd over seeds")
    label_ticks(axes[0], sorted({point[0] for points in series.values() for point in points}), log_y=False)
    save(figure, axes, path)
