"""What a whole study says, on its page, in Markdown, in tables and at W&B; it is killed on the way and continued."""

import csv
import json
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.configuration import build
from pipeline.evaluation.config import StudyConfig
from pipeline.evaluation.findings import Findings, find
from pipeline.evaluation.study import plan_study
from pipeline.training.server import REPORT, publish, publish_if_online, sync
from tests.evaluation.miniature import jobs, start, write_study
from tests.training.jobs import signal_when
from tests.training.test_tracking import begin, no_account, train  # noqa: F401
from tests.training.test_tracking import server as wandb_server  # noqa: F401
from tests.training.wandb_server import Server

WARM = {"warm": {"model.family": "encoder-decoder", "start": "encoder"}}
SECTIONS = (
    "scores", "what-each-model-got", "learning-curves", "cost-and-quality", "where-they-disagree",
    "samples-side-by-side", "where-they-look", "to-repeat-it",
)  # fmt: skip


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of all families and tasks, killed in the middle of a job and continued."""
    folder = tmp_path_factory.mktemp("report")
    settings = write_study(folder) | {"variants": json.dumps(WARM), "skip": "[]"}
    output, done = folder / "out.txt", folder / "study"

    def finished() -> set[str]:
        return {str(path.parent.parent) for path in done.glob("*/bundle/meta.json")}

    assert signal_when(start(settings, output), lambda: len(finished()) >= 5 and len(jobs(output)) > 5) == -9
    before, begun = finished(), len(jobs(output))
    process = start(settings, output)
    process.join(300)
    assert process.exitcode == 0, output.read_text()[-3000:]
    again = jobs(output)[begun:]
    assert not before & set(again), "a finished job was done again"
    assert set(again) | before == finished() and len(finished()) == 6 + 6 + 6 + 6
    assert not list(done.glob("*/checkpoints")), "what is finished keeps checkpoints"
    return done


@pytest.fixture(scope="module")
def findings(study: Path) -> Findings:
    return find(plan_study(build(StudyConfig, [study / "config.yaml"], {})), [])


def test_the_study_is_told_in_words_and_tables(study: Path, findings: Findings) -> None:
    told = (study / "report.md").read_text()
    assert Counter(pair.one.task for pair in findings.pairs) == {"sentiment": 3, "retrieval": 3, "summarization": 1}
    assert all(f"- **{pair.one.task}**: {pair.sentence}" in told for pair in findings.pairs)
    assert "warm" not in {one.name for pair in findings.pairs for one in (pair.one, pair.other)}
    with (study / "scores.csv").open() as opened:
        rows = list(csv.DictReader(opened))
    assert [row["model"] for row in rows if row["task"] == "summarization"] == ["decoder", "encoder-decoder", "warm"]
    assert {row["part"] for row in rows if row["task"] == "sentiment"} == {"test"}
    meta = json.loads(next(study.glob("sentiment-encoder-1-*/bundle/meta.json")).read_text())
    other = json.loads(next(study.glob("sentiment-encoder-2-*/bundle/meta.json")).read_text())
    mean = 50 * (meta["metrics"]["test/accuracy"] + other["metrics"]["test/accuracy"])
    assert rows[0]["mean"] == f"{mean:.2f}" and rows[0]["seeds"] == "2"
    with (study / "differences.csv").open() as opened:
        first = next(csv.DictReader(opened))
    pair = findings.pairs[0].difference
    assert first["pair"] == "encoder − decoder" and first["seed noise"] == f"{100 * (pair.seed_noise or 0):.2f}"
    assert first["p of study"] == f"{pair.adjusted:.3f}"


class Reader(HTMLParser):
    """Checks that what is opened is closed, and gathers what a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "img", "input"):
            self.open.append(tag)
        given = dict(attrs)
        self.names += [str(given["id"])] if given.get("id") else []
        self.links += [str(given[key]) for key in ("src", "href", "xlink:href") if given.get(key)]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag


def test_the_page_is_whole_and_needs_nothing_else(study: Path) -> None:
    page = (study / "report.html").read_text()
    reader = Reader()
    reader.feed(page)
    assert not reader.open and max(Counter(reader.names).values()) == 1
    assert set(SECTIONS) <= set(reader.names) and "<script" not in page
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in reader.links)
    assert {link[1:] for link in reader.links if link.startswith("#")} <= set(reader.names), "a link to nothing"
    assert not re.search(r"url\((?!#)", page) and "http" not in page.replace("http://www.w3.org/1999/xlink", "")
    titles = re.findall(r"<title>(.*?)</title>", page)
    assert any(re.match(r"encoder, sentiment: [\d.]+ ± [\d.]+ \(95 %, 2 seeds\)", title) for title in titles)
    assert page.count("<img") == 3 + 3 + 3  # attention of every model on every task


# --- In a browser ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Debian's chromium."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    webdriver: Any = pytest.importorskip("selenium.webdriver", reason="pip install selenium")
    if not chromium or not driver:
        pytest.skip("to test the page in a browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    running = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield running
    running.quit()


def test_the_page_in_a_browser(study: Path, browser: Any) -> None:
    """It draws, its axis is chosen by click and by key, nothing complains, and it fits a phone and a dark room."""
    browser.set_window_size(1200, 900)
    browser.get((study / "report.html").as_uri())
    panes = browser.find_elements("css selector", "#learning-curves .pane")
    assert [pane.is_displayed() for pane in panes] == [True, False, False]
    assert panes[0].find_element("tag name", "svg").size["height"] > 100
    browser.find_element("css selector", "label[for=axis-1]").click()
    assert [pane.is_displayed() for pane in panes] == [False, True, False]
    browser.switch_to.active_element.send_keys("\ue014")  # arrow right
    assert [pane.is_displayed() for pane in panes] == [False, False, True]
    assert browser.find_element("css selector", "#cost-and-quality .pane").is_displayed()
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    ink = "return getComputedStyle(document.querySelector('svg text')).fill"
    light = browser.execute_script(ink)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    assert browser.execute_script(ink) != light, "charts stay black in the dark"
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 390, (
        "a phone has to scroll sideways"
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    assert all(pane.is_displayed() for pane in panes), "paper shows one axis only"
    assert browser.get_log("browser") == []


# --- At W&B ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of wandb-workspaces
def test_sync_publishes_the_report_and_brings_it_up_to_date(
    study: Path,
    tmp_path: Path,
    wandb_server: Server,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    tracker = begin(tmp_path / "run", mode="offline")
    train(tracker, 1, 2)
    tracker.finish()
    shutil.copy(study / REPORT, tmp_path / REPORT)
    publish_if_online(tmp_path)
    assert f"triptych sync {tmp_path}" in capsys.readouterr().err and not wandb_server.reports
    sync(tmp_path)
    assert "the report is at http" in capsys.readouterr().err
    (identity,) = wandb_server.reports
    sent = json.loads(wandb_server.reports[identity]["spec"])
    grids = [block["metadata"] for block in sent["blocks"] if block["type"] == "panel-grid"]
    panels = [panel for grid in grids for panel in grid["panelBankSectionConfig"]["panels"]]
    lines = [panel["config"] for panel in panels if panel["viewType"] == "Run History Line Plot"]
    assert {(line["xAxis"], *line["metrics"]) for line in lines} >= {("tokens", "val/loss"), ("flops", "val/accuracy")}
    assert all(line["groupBy"] == "model_name.value" and line["groupArea"] == "minmax" for line in lines)
    kinds = Counter(panel["viewType"] for panel in panels)
    assert kinds == {"Run History Line Plot": 8, "Bar Chart": 3, "Scatter Plot": 3, "Weave": 3}
    asked = json.dumps([grid["runSets"] for grid in grids])
    assert '"name": "group"}, "op": "=", "value": "study"' in asked and '"value": "pretrain"' in asked
    assert "±" in wandb_server.reports[identity]["spec"]
    publish_if_online(tmp_path)
    assert wandb_server.requests.count("upsertView") == 2
    assert list(wandb_server.reports) == [identity], "a second report instead of a newer one"


def test_without_the_extra_the_report_waits(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    shutil.copy(study / REPORT, tmp_path / REPORT)
    publish(tmp_path / REPORT)
    assert "pip install wandb-workspaces" in capsys.readouterr().err
