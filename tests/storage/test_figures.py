import xml.etree.ElementTree as ElementTree

import numpy as np

from rstar_jax.storage.figures import MAX_POINTS, Panel, Series, binned, caption, rolling_mean, svg


def line(points, label="a", **kwargs):
    x = np.arange(points, dtype=np.float64)
    return Series(label, x, x / 7, **kwargs)


def test_bins_hold_the_same_number_of_points_and_leave_nan_out():
    x, y = binned(np.arange(7.0), np.asarray([1, 3, np.nan, 5, np.nan, np.nan, 9.0]), 4)
    np.testing.assert_array_equal(x, [0.5, 2.5, 4.5, 6.0])
    np.testing.assert_array_equal(y, [2, 5, np.nan, 9])


def test_few_points_are_not_binned():
    x, y = binned(np.arange(3.0), np.asarray([1.0, 2, 3]), 3)
    np.testing.assert_array_equal(y, [1, 2, 3])
    assert len(x) == 3


def test_the_rolling_mean_is_centred_and_leaves_nan_out():
    np.testing.assert_allclose(rolling_mean(np.asarray([1.0, 2, np.nan, 6, 7]), 3), [1.5, 1.5, 4, 6.5, 6.5])


def test_a_figure_takes_its_colours_from_the_page_and_its_text_stays_text():
    element = svg(Panel("Reward", (line(5), line(5, r"cost in $ \alpha$ <b>", color=1)), ((0.0, "sft"), (3.0, "rl"))))
    tree = ElementTree.fromstring(element.replace("xlink:href", "href"))
    texts = {"".join(node.itertext()).strip() for node in tree.iter("text")}
    assert {"sft", "rl", "a", r"cost in $ \alpha$ <b>", "step of the run"} <= texts
    assert "var(--series-0)" in element
    assert "var(--series-1)" in element
    assert "#0b0" not in element
    assert "http" not in element
    assert "font-family" not in element


def test_the_same_panel_gives_the_same_text():
    panel = Panel("Reward", (line(60),))
    assert svg(panel) == svg(panel)


def test_figures_of_one_page_share_no_ids():
    ids = [{node.get("id") for node in ElementTree.fromstring(svg(Panel(title, (line(5),)))).iter()} for title in ("a", "b")]
    assert ids[0] & ids[1] <= {None}


def test_the_caption_tells_what_was_averaged_and_what_is_missing():
    assert caption(Panel("Reward", (line(5),))) == ""
    assert caption(Panel("Reward", (line(2 * MAX_POINTS),))).startswith("Each point is the mean of 2 steps; thick line: mean of")
    broken = Series("a", np.arange(3.0), np.asarray([1.0, np.inf, np.nan]))
    assert caption(Panel("Reward", (broken,))) == "2 values were not finite and are not drawn"
    assert svg(Panel("Reward", (broken,))).startswith("<svg")
