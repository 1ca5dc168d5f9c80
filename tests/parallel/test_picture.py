"""docs/cuts.svg is what docs/draw_cuts.py draws, and that is how a model is cut."""

import runpy

from conftest import REPOSITORY

from poptransformer.parallel import even_cut


def test_the_picture_is_up_to_date():
    drawing = runpy.run_path(str(REPOSITORY / "docs" / "draw_cuts.py"))
    assert drawing["draw"]() == (REPOSITORY / "docs" / "cuts.svg").read_text(encoding="utf-8"), "run docs/draw_cuts.py"
    matrices = {name.removesuffix(".weight") for name, each in drawing["build"]().named_parameters().items() if each.cut}
    assert matrices == set(drawing["PLACES"])
    assert drawing["strips"](even_cut(0, 5, 4)) == [(0, 2, (0,)), (2, 4, (1,)), (4, 5, (2,))]
