"""A plan as a picture: a box for each device, filled as far as its memory is."""

from __future__ import annotations

import os
import pathlib

from poptransformer.errors import UnsupportedError, UserError
from poptransformer.planning.models import Sizes
from poptransformer.planning.stages import Plan, Stage
from poptransformer.planning.text import share, size

SUFFIXES = (".png", ".svg")
MOST_COLUMNS = 8  # ranks that are drawn side by side; of more, one is drawn for all
COLORS = {"weights": "#4477aa", "memory": "#ee9944", "activations": "#88bb66", "free": "#f2f2f2"}
BOX_INCHES, ROW_INCHES, MARGIN_INCHES = 3.2, 0.62, 1.1


def check(path) -> None:
    """Refuse what could not be drawn, before any work.

    Raises: UnsupportedError for another ending than those of SUFFIXES; UserError if matplotlib is not installed, or the folder
      is not there.
    """
    path = pathlib.Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise UnsupportedError(f"picture={str(path)!r}: pictures end in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise UserError(f"picture={str(path)!r}: there is no folder {path.parent}")
    _figure_class()


def _figure_class():
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError("drawing a picture needs the package matplotlib: pip install 'matplotlib>=3.9,<4'") from None
    return Figure


def save(plan: Plan, sizes: Sizes, path) -> None:
    """Draw a plan into a file.

    Args:
      plan: rows of the picture are its stages, columns its ranks.
      sizes: of the model, for the title.
      path: ends in .png or .svg.
    Raises: UserError as `check` does, or if the file cannot be written.
    """
    check(path)
    columns, rows = _num_columns(plan), len(plan.stages)
    figure = _figure_class()(figsize=(max(columns, 2) * BOX_INCHES, rows * ROW_INCHES + MARGIN_INCHES), layout="constrained")
    draw(figure, plan, sizes)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"picture={os.fspath(path)!r}: cannot be written ({error.strerror})") from error


def _num_columns(plan):
    return plan.num_replicas if plan.num_replicas <= MOST_COLUMNS else 1


def draw(figure, plan: Plan, sizes: Sizes) -> None:
    """Draw a plan into a matplotlib figure."""
    columns, rows = _num_columns(plan), len(plan.stages)
    axes = figure.subplots()
    for stage in plan.stages:
        for rank in range(columns):
            _draw_device(axes, plan, stage, rank)
    if columns > 1:
        for rank in range(columns):
            axes.text(rank + 0.46, -0.12, f"rank {rank}", ha="center", va="bottom", fontsize=8)
    axes.set_xlim(-0.04, columns)
    axes.set_ylim(rows - 0.1, -0.4)
    axes.axis("off")
    figure.suptitle(_title(plan, sizes), fontsize=10)
    figure.legend(handles=_legend(plan), loc="outside lower center", ncols=4, fontsize=8, frameon=False)


def _title(plan, sizes):
    ranks = f", {plan.num_replicas} ranks" if plan.num_replicas > 1 else ""
    alike = f" (all {plan.num_replicas} ranks are alike; one is drawn)" if plan.num_replicas > MOST_COLUMNS else ""
    return f"{sizes.name}, {sizes.precision}: {plan.num_taken} x {plan.device.name}{ranks}{alike}"


def _parts(stage: Stage):
    return {"weights": stage.weight_bytes, "memory": stage.cache_bytes, "activations": stage.activation_bytes}


def _draw_device(axes, plan, stage, rank):
    from matplotlib.patches import Rectangle

    left, width, height = rank, 0.92, 0.34
    top = stage.index + 0.3
    axes.add_patch(Rectangle((left, top), width, height, facecolor=COLORS["free"], edgecolor="none"))
    for part, num_bytes in _parts(stage).items():
        part_width = width * num_bytes / plan.device.memory_bytes
        axes.add_patch(Rectangle((left, top), part_width, height, facecolor=COLORS[part], edgecolor="none"))
        left += part_width
    axes.add_patch(Rectangle((rank, top), width, height, facecolor="none", edgecolor="#444444", linewidth=0.8))
    name = f"{plan.device.name} {stage.index}" if plan.num_replicas == 1 else f"stage {stage.index}"
    axes.text(rank, top - 0.04, f"{name}: {stage.holds}", ha="left", va="bottom", fontsize=8)
    used = f"{size(stage.total_bytes)}, {share(stage.total_bytes, plan.device.memory_bytes)}"
    axes.text(rank + width, top - 0.04, used, ha="right", va="bottom", fontsize=8)


def _legend(plan):
    from matplotlib.patches import Patch

    names = {"weights": "weights", "memory": plan.footprint.memory, "activations": "activations", "free": "free"}
    return [Patch(facecolor=COLORS[part], edgecolor="#444444", linewidth=0.4, label=name) for part, name in names.items()]
