"""What the tests of Session share: cases with known tokens, and small helpers."""

import json

from conftest import REPOSITORY

GOLDEN = json.loads((REPOSITORY / "tests" / "golden" / "gpt2.json").read_text(encoding="utf-8"))
CASES = GOLDEN["gpt2-tiny"]["cases"]
PROMPT, GREEDY = CASES[1]["prompt"], CASES[1]["greedy"]
TEXT = "Once upon a time"
DICT = {"model_type": "gpt2", "vocab_size": 50, "n_embd": 12, "n_head": 2, "n_layer": 2, "n_positions": 40, "eos_token_id": 49}
MIXED = [
    {"prompt": [7], "seed": 1, "temperature": 0.0},
    {"prompt": PROMPT, "seed": 2, "temperature": 1.0, "top_k": 20},
    {"prompt": list(range(40)), "seed": -3, "temperature": 3.0},
    {"prompt": [250, 3], "seed": 2**70, "temperature": 0.7, "top_p": 0.6},
    {"prompt": list(range(100, 117)), "seed": 5, "temperature": 1.0, "min_p": 0.2, "repetition_penalty": 1.5},
    {"prompt": [9] * 16, "seed": 5, "temperature": 0.0, "repetition_penalty": 2.0},
    {"prompt": [9] * 17, "seed": 1, "temperature": 1.0, "max_new_tokens": 1},
]


def ids(generations):
    return [generation.token_ids for generation in generations]


def join(pieces, row=0):
    """(text, ids, finish reason) of a row's pieces."""
    mine = [piece for piece in pieces if piece.row == row]
    assert all(piece.finish_reason is None for piece in mine[:-1])
    text = None if any(piece.text is None for piece in mine) else "".join(piece.text for piece in mine)
    return text, [token_id for piece in mine for token_id in piece.token_ids], mine[-1].finish_reason


def whole(generation):
    return generation.text, generation.token_ids, generation.finish_reason


def generate_rows(session, rows):
    columns = {"temperature": 0.0, "seed": 0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    columns["max_new_tokens"] = 15
    settings = {name: [row.get(name, default) for row in rows] for name, default in columns.items()}
    return ids(session.generate([row["prompt"] for row in rows], ignore_eos=True, **settings))
