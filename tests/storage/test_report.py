import html.parser
import json

import pytest

from rstar_jax.storage.metrics import MetricsWriter
from rstar_jax.storage.report import (
    build_report,
    curves,
    evaluation_table,
    headline,
    load_run,
    load_runs,
    number,
    progress,
    write_report,
)
from rstar_jax.storage.trajectories import write_trajectories
from rstar_jax.types import UserError

VOID = {"meta", "br", "link", "img", "input", "hr"}


class Page(html.parser.HTMLParser):
    """Tags with their attributes, the text outside scripts and styles, and whether every element is closed in order."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.text, self.open = [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"{tag} closes something else"

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text.append(data)

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def embedded(page):
    start = page.index('id="data">') + len('id="data">')
    return json.loads(page[start : page.index("</script>", start)])


def test_the_page_is_well_formed_and_asks_nothing_of_the_network(run_directory):
    page = build_report(run_directory)
    parsed = Page(page)
    assert parsed.open == []
    assert "http:" not in page
    assert "https:" not in page
    assert "url(//" not in page
    loading = {"src", "srcset", "action", "data", "poster"}
    assert not [attrs for tag, attrs in parsed.tags if loading & attrs.keys() or tag in ("link", "iframe", "img")]


def test_the_page_says_what_the_run_learned(run_directory):
    words = Page(build_report(run_directory)).words
    assert "40.0 % → 80.0 %" in words
    assert (
        "Accuracy, sampled, rose from 40.0 % to 80.0 % (after sft to after rl); the 95 % intervals [35.0 %, 45.0 %] and "
        "[75.0 %, 85.0 %] do not overlap." in words
    )
    assert "closes 67 % of the gap" in words  # (0.8 - 0.4) / (1 - 0.4)
    assert "Accuracy, greedy, stayed at 50.0 %." in words
    assert "sft: 4 steps · rl: 6 steps" in words


def test_intervals_that_overlap_are_called_undecided(tmp_path, new_run):
    new_run(tmp_path / "run", accuracies=(0.40, 0.49))
    (first, *_) = headline(load_run(tmp_path / "run"))["sentences"]
    assert "overlap: this evaluation alone does not establish a difference" in first


def test_a_fall_is_called_a_fall_and_closes_no_gap(tmp_path, new_run):
    new_run(tmp_path / "run", accuracies=(0.8, 0.4))
    sentences = headline(load_run(tmp_path / "run"))["sentences"]
    assert "fell from 80.0 % to 40.0 %" in sentences[0]
    assert not [s for s in sentences if "gap" in s]


def test_an_evaluation_that_is_not_a_number_is_shown_as_such(tmp_path, new_run):
    new_run(tmp_path / "run", accuracies=(0.8, float("nan")))
    assert headline(load_run(tmp_path / "run"))["figures"] == "80.0 % → nan"
    assert "went from 80.0 % to nan" in Page(build_report(tmp_path / "run")).words


def test_a_run_that_has_only_begun_has_a_page(tmp_path, new_run):
    new_run(tmp_path / "run")
    for name in ("metrics.jsonl", "trajectories"):
        path = tmp_path / "run" / name
        path.rename(tmp_path / name)
    words = Page(build_report(tmp_path / "run")).words
    assert "sft: not begun · rl: not begun" in words
    for sentence in ("No evaluation has been recorded", "No step has been recorded", "No rollout has been recorded"):
        assert sentence in words


def test_an_unfinished_stage_is_told_with_its_step(tmp_path, new_run):
    new_run(tmp_path / "run")
    with MetricsWriter(tmp_path / "run", resume_after=6) as writer:
        writer.write("rl", 1, 3, 7, "train", {"reward": 0.5}, {})
    run = load_run(tmp_path / "run")
    assert progress(run) == ["sft: 4 steps", "rl: stopped or still running at step 3 of 6"]
    assert headline(run)["figures"] == "40.0 %"


def test_a_loss_of_another_kind_of_stage_is_another_figure(run_directory):
    found = curves([load_run(run_directory)])
    assert [panel.title for panel in found["main"]] == ["Accuracy on held-out problems", "Mean reward", "Loss, SFT", "Loss, RL"]
    accuracy, reward, sft, rl = found["main"]
    assert [series.label for series in accuracy.series] == ["sampled", "greedy"]
    assert accuracy.series[0].x.tolist() == [4, 10]
    assert accuracy.series[0].y.tolist() == [0.4, 0.8]
    assert reward.series[0].x.tolist() == [5, 6, 7, 8, 9, 10]
    assert (len(sft.series[0].x), len(rl.series[0].x)) == (4, 6)
    assert reward.boundaries == ((1.0, "sft"), (5.0, "rl"))
    assert [panel.title for panel in found["time"]] == ["Seconds"]


def test_metrics_of_unknown_names_are_drawn_too(run_directory):
    with MetricsWriter(run_directory, resume_after=10) as writer:
        writer.write("rl", 1, 7, 11, "train", {"odd_new_thing": 1.0}, {"odd_clock": 1.0})
    found = curves([load_run(run_directory)])
    assert "Odd new thing" in [panel.title for panel in found["more"]]
    assert "Odd clock" in [panel.title for panel in found["time"]]


def test_the_table_shows_intervals_beside_their_value():
    table = evaluation_table([("after sft", {"sampled/accuracy": 0.4, "sampled/accuracy_low": 0.35, "sampled/accuracy_high": 0.45})])
    assert table == {"head": ["after sft"], "body": [("Accuracy, sampled", [("40.0 %", "[35.0 %, 45.0 %]")])]}


def test_the_table_keeps_a_metric_whose_name_merely_ends_in_low():
    table = evaluation_table([("a", {"flow_low": 2.0}), ("b", {"other": 3.0})])
    assert table["body"] == [("Flow low", [("2", ""), ("", "")]), ("Other", [("", ""), ("3", "")])]


def test_text_of_trajectories_never_becomes_markup(tmp_path, new_run, new_rollout, new_record):
    attack = "</script><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7*7 }}"
    new_run(tmp_path / "run")
    write_trajectories(tmp_path / "run", "rl", 6, [new_record(new_rollout(question=attack, shown=attack, problem_id=attack), step=6)])
    page = build_report(tmp_path / "run")
    assert len([tag for tag, _ in Page(page).tags if tag == "script"]) == 2
    assert "<img" not in page
    (group,) = embedded(page)["steps"][-1]["groups"]
    assert (group["id"], group["question"]) == (attack, attack)
    assert group["rollouts"][0]["turns"][0]["calls"][0]["shown"] == attack


def test_text_of_the_configuration_and_the_summary_never_becomes_markup(tmp_path, new_run):
    new_run(tmp_path / "run", "<b>name</b>")
    (tmp_path / "run" / "summary.json").write_text(json.dumps({"shows": "<i>the loop</i>", "does_not_show": "a & b"}))
    page = build_report(tmp_path / "run")
    assert "<b>" not in page
    assert "<i>" not in page
    words = Page(page).words
    assert "What this shows <i>the loop</i>" in words
    assert "What it does not show a & b" in words


def test_the_viewer_holds_what_the_selection_decided(run_directory):
    steps = embedded(build_report(run_directory))["steps"]
    assert [(step["stage"], step["step"]) for step in steps] == [("rl", 1), ("rl", 3), ("rl", 6)]
    rollout = steps[0]["groups"][1]["rollouts"][1]
    assert (rollout["reward"], rollout["selected"], rollout["advantage"]) == (1.0, True, 0.5)
    assert rollout["penalties"] == {"error": 0.5, "format": 0.0}
    assert [span["kind"] for span in rollout["spans"]] == ["prompt", "sampled", "observed", "sampled"]


def test_runs_are_compared_side_by_side(tmp_path, new_run):
    new_run(tmp_path / "a", "first", accuracies=(0.4, 0.8))
    new_run(tmp_path / "b", "second", seed=7, accuracies=(0.4, 0.6))
    page = build_report(tmp_path / "a", [tmp_path / "b"])
    words = Page(page).words
    assert "first (after rl) second (after rl)" in words
    assert "80.0 % [75.0 %, 85.0 %] 60.0 % [55.0 %, 65.0 %]" in words
    assert "seed: 0 -> 7" in words
    found = curves(load_runs([tmp_path / "a", tmp_path / "b"]))
    assert [series.label for series in found["main"][1].series] == ["first", "second"]
    assert [series.label for series in found["main"][0].series][::2] == ["first, sampled", "second, sampled"]


def test_runs_of_one_name_are_told_apart(tmp_path, new_run):
    for name in "ab":
        new_run(tmp_path / name, "same")
    paths = [tmp_path / "a", tmp_path / "b"]
    assert [run.label for run in load_runs(paths)] == [str(path) for path in paths]
    assert [run.label for run in load_runs(paths[:1] * 2)] == [f"{paths[0]} (1)", f"{paths[0]} (2)"]


def test_the_same_run_gives_the_same_page(run_directory):
    assert build_report(run_directory) == build_report(run_directory)


def test_the_page_is_written_beside_the_run_or_where_it_is_asked_for(run_directory, tmp_path):
    assert write_report(run_directory) == run_directory / "report.html"
    other = write_report(run_directory, tmp_path / "new" / "page.html")
    assert other.read_bytes() == (run_directory / "report.html").read_bytes()
    assert other.read_bytes().startswith(b"<!doctype html>")


def test_a_directory_without_a_run_or_with_broken_files_is_one_line(run_directory, tmp_path):
    (tmp_path / "empty").mkdir()
    for directory, words in ((tmp_path / "nowhere", "no such directory"), (tmp_path / "empty", "holds no run")):
        with pytest.raises(UserError, match=words):
            build_report(directory)
        with pytest.raises(UserError, match=words):
            build_report(run_directory, [directory])
    with pytest.raises(UserError, match="cannot write the report"):
        write_report(run_directory, tmp_path / "empty")
    (run_directory / "summary.json").write_text('{"shows": 3}')
    with pytest.raises(UserError, match=r"summary\.json must hold texts under title, shows, does_not_show"):
        build_report(run_directory)
    for text, words in (("{", "is not JSON"), ("[]", "must hold a JSON object"), ("{}", "its stages are missing")):
        (run_directory / "config.json").write_text(text)
        with pytest.raises(UserError, match=words):
            build_report(run_directory)


def test_shares_are_percentages_and_counts_are_not():
    assert number("sampled/pass@4", 0.25) == "25.0 %"
    assert number("sampled/pass@4_problems", 512.0) == "512"
    assert number("greedy/tool_error_rate", 0.031) == "3.1 %"
    assert number("learning_rate", 0.0005) == "0.0005"
