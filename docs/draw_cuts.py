"""Draws docs/cuts.svg, which rank holds what of one layer's weights: python docs/draw_cuts.py

The picture is made of the cuts themselves: a small Llama is built for four ranks, and each of its matrices is drawn with the
colour of the rank, or the colours of the ranks, that hold a row or column.
"""

import pathlib
import sys

import numpy as np

REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
WORLD_SIZE = 4
# Six query heads, two key/value heads, and sizes that four ranks do not divide.
CONFIG = {
    "model_type": "llama", "vocab_size": 62, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 90, "num_hidden_layers": 1, "max_position_embeddings": 32,
}  # fmt: skip
COLORS = ("#4477aa", "#ee9944", "#88bb66", "#aa6688")
UNIT = 2.2  # points of one row or column
GAP, LEFT, TOP, TEXT = 34, 16, 58, 11
# Where each matrix stands: column, and what is written under its name.
PLACES = {
    "model.embed_tokens": (0, "tokens: rows"),
    "model.layers.0.self_attn.q_proj": (1, "6 query heads: rows"),
    "model.layers.0.self_attn.k_proj": (1, "2 key heads: rows"),
    "model.layers.0.self_attn.v_proj": (1, "2 value heads: rows"),
    "model.layers.0.self_attn.o_proj": (2, "6 query heads: columns"),
    "model.layers.0.mlp.gate_proj": (3, "90 features: rows"),
    "model.layers.0.mlp.up_proj": (4, "90 features: rows"),
    "model.layers.0.mlp.down_proj": (5, "90 features: columns"),
    "lm_head": (6, "tokens: rows"),
}


def build():
    """The model as a rank sees it."""
    from poptransformer.models import find_model
    from poptransformer.register import REGISTER

    model_class, float32 = find_model(CONFIG), np.dtype(np.float32)
    kinds = {"dtype": float32, "weight_dtype": float32, "cache_dtype": float32, "packing": None}
    with REGISTER.scope(batch_size=1, max_length=32, world_size=WORLD_SIZE, **kinds):
        return model_class(model_class.config_class.from_hf(CONFIG))


def strips(cut):
    """[(begin, end, ranks that hold these rows or columns)], in order."""
    holders = [
        tuple(rank for rank in range(WORLD_SIZE) if index in cut.indices(rank).tolist()) for index in range(cut.whole_size)
    ]
    borders = [0, *(i for i in range(1, len(holders)) if holders[i] != holders[i - 1]), len(holders)]
    return [(begin, end, holders[begin]) for begin, end in zip(borders[:-1], borders[1:], strict=True)]


def box(x, y, width, height, color):
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{color}"/>'


def label(x, y, text, size=TEXT, weight="normal"):
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}">{text}</text>'


def draw() -> str:
    """The picture as SVG."""
    model = build()
    matrices = {name.removesuffix(".weight"): parameter for name, parameter in model.named_parameters().items()}
    left, width, height, shapes = LEFT, 0.0, 0.0, []
    column, top, widest = 0, TOP, 0.0
    for name, (place, words) in PLACES.items():
        rows, columns = matrices[name].logical_shape
        if place != column:
            left, top, column, widest = left + widest + GAP, TOP, place, 0.0
        cut = matrices[name].cut
        shapes += [label(left, top - 16, name.rpartition(".")[2], weight="bold"), label(left, top - 4, words, 9)]
        for begin, end, ranks in strips(cut):
            for i, rank in enumerate(ranks):  # what several ranks hold has the colours of all, side by side
                if cut.axis == 0:
                    part = columns / len(ranks)
                    shapes.append(
                        box(left + i * part * UNIT, top + begin * UNIT, part * UNIT, (end - begin) * UNIT, COLORS[rank])
                    )
                else:
                    part = rows / len(ranks)
                    shapes.append(
                        box(left + begin * UNIT, top + i * part * UNIT, (end - begin) * UNIT, part * UNIT, COLORS[rank])
                    )
        shapes.append(
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{columns * UNIT:.1f}" height="{rows * UNIT:.1f}" fill="none" '
            'stroke="#333333" stroke-width="0.8"/>'
        )
        widest = max(widest, columns * UNIT, 95)
        height = max(height, top + rows * UNIT)
        top += rows * UNIT + GAP + 6
        width = max(width, left + widest)
    legend = []
    for rank, color in enumerate(COLORS):
        legend += [box(LEFT + rank * 80, 8, 14, 14, color), label(LEFT + rank * 80 + 20, 19, f"rank {rank}")]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + LEFT:.0f} {height + LEFT:.0f}" '
        'font-family="sans-serif" fill="#222222">'
    )
    background = box(0, 0, width + LEFT, height + LEFT, "#ffffff")
    return "\n".join([head, background, *legend, *shapes, "</svg>", ""])


if __name__ == "__main__":
    sys.path.insert(0, str(REPOSITORY))
    (REPOSITORY / "docs" / "cuts.svg").write_text(draw(), encoding="utf-8")
