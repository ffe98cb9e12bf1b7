"""`kvledger export --html`, seen in a real browser: complete, safe, and usable with a link."""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from headless_browser import Page
from lifecycle_driver import Driver, keys_of, play_seed
from stored_logs import OPENED_AT, serve_many, tell_story, write_log

from kvledger.adapters.tools.logs.sources import find_logs
from kvledger.adapters.tools.reasons import BY_DESIGN, Reason
from kvledger.lifecycle import events as e

REQUEST = "chat-17-b6"
HOSTILE = "<script>document.title='owned'</script>\"'><img src=x onerror=\"document.title='owned'\">&amp;\u202e\x07"
HOUR_NS = 3600 * 10**9

pytestmark = pytest.mark.xdist_group("browser")


@pytest.fixture
def story_page(run: Any, log: Path, tmp_path: Path) -> Path:
    """The story as a page."""
    path = tmp_path / "page.html"
    assert run("export", log, "--html", "-o", path).exit_code == 0
    return path


def opened(page: Page, path: Path, fragment: str = "") -> Page:
    """The page, loaded; whatever it logs or asks for fails the test."""
    page.look()
    page.open("about:blank")
    page.open(path.as_uri() + fragment)
    assert page.console == []
    assert page.requests == [path.as_uri()]
    return page


def at_pace(events: Iterable[e.Event]) -> Iterator[e.Event]:
    """The events with long ids, at an engine's pace, and never back in time."""
    now_ns = 0
    for event in events:
        fields: dict[str, Any] = {}
        if getattr(event, "request_id", ""):
            fields["request_id"] = f"chatcmpl-tenant-1-{event.request_id:>04}"  # type: ignore[attr-defined]
        if hasattr(event, "time_ns"):
            fields["time_ns"] = now_ns = max(now_ns, 300_000 * event.time_ns)
        yield msgspec.structs.replace(event, **fields)


class _Text(HTMLParser):
    """The text of a page, as one without scripts, styles and graphics reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._hidden += tag in {"script", "style"}
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href", "action", "data"}]

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in {"script", "style"}

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text.append(data)


def parsed(path: Path) -> _Text:
    """A page as its markup says it."""
    reader = _Text()
    reader.feed(path.read_text())
    return reader


def test_the_essentials_are_there_without_scripts(story_page: Path) -> None:
    """Verdict, facts, and the life of each request in words stand in the markup."""
    text = " ".join(parsed(story_page).text)
    for essential in (
        "sound: every rule that a log can decide is kept",
        "kvledger 0.1.0, vLLM 0.32.0",
        "2025-06-15 15:06:40 UTC",
        "block 16 tokens, chunk 8 tokens, 32 slots, 1 rank",
        "preempted with 64 settled tokens, lost 4 blocks",
        "load 3 starts: tokens 0–63 into 4 blocks (7–10)",
        "running → preempted",
        "tokens recovered 64, retained 0, recomputed 0",
    ):
        assert essential in text


def test_a_page_refers_to_nothing_but_itself(story_page: Path) -> None:
    """No address but fragments of its own; its style and its one script stand in it and are named by their hashes."""
    page = parsed(story_page)
    assert page.addresses
    assert all(address.startswith("#") for address in page.addresses)
    assert page.tags.count("script") == 1
    assert not {"link", "iframe", "object", "embed", "base", "form", "img"} & set(page.tags)
    markup = story_page.read_text()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', markup)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'")
    assert "unsafe" not in policy[1]
    assert len(re.findall(r"(?:style|script)-src 'sha256-[^']+'", policy[1])) == 2
    assert not re.search(r"\sstyle=|\son\w+=", re.sub(r"<(style|script)>.*?</\1>", "", markup, flags=re.DOTALL))


def test_a_page_opens_from_a_file_without_an_error_and_without_a_request(page: Page, story_page: Path) -> None:
    """A ticket system shows it as it is; its own policy is kept."""
    shown = opened(page, story_page)
    assert shown.evaluate("document.querySelector('.verdict').textContent").startswith("sound")
    assert shown.evaluate("document.querySelectorAll('.row.request').length") == 2
    assert shown.evaluate("document.querySelector('rect.s-preempted').getBoundingClientRect().width") > 10
    assert shown.evaluate("document.querySelectorAll('.ticks text').length") > 3


def test_nothing_of_a_request_id_is_ever_run(run: Any, page: Page, tmp_path: Path) -> None:
    """Tags, quotes and invisible characters in an id are only shown, in the markup and after scripts touched them."""
    story = tell_story(HOSTILE, "</title></svg></script>x")
    events = [*story.observed, e.HookFailed("on_new_request", HOSTILE, HOSTILE, 10**12)]
    directory = write_log(tmp_path / "log", events, story.configuration)
    path = tmp_path / "page.html"
    assert run("export", directory, "--html", "-o", path).exit_code == 0
    assert parsed(path).tags.count("script") == 1
    assert "\u202e" not in path.read_text()
    shown = opened(page, path)
    assert shown.evaluate("document.title") == "kvledger · log"
    seen = HOSTILE.replace("\u202e", "\\u202e").replace("\x07", "\\u0007")
    assert shown.evaluate("document.querySelector('.row.request .label').textContent") == seen
    shown.click(".row.request .label")
    shown.wait_until("document.querySelector('details.request').open")
    assert (
        shown.evaluate("document.querySelector(':target').previousElementSibling.querySelector('b').textContent")
        == seen
    )
    assert shown.evaluate("document.title") == "kvledger · log"
    assert shown.evaluate("document.querySelectorAll('img').length") == 0


def test_an_address_opens_a_request(page: Page, story_page: Path) -> None:
    """A link in a ticket leads to what it is about."""
    shown = opened(page, story_page, "#request=" + urllib.parse.quote(REQUEST))
    opened_ids = "[...document.querySelectorAll('details[open] summary b')].map((e) => e.textContent)"
    shown.wait_until(f"({opened_ids}).length > 0")
    assert shown.evaluate(opened_ids) == [REQUEST]
    assert 0 <= shown.evaluate("document.querySelector('details[open] summary').getBoundingClientRect().top") < 900


def test_how_the_log_ended_and_where_tokens_came_from_stand_above_the_timeline(
    run: Any, page: Page, tmp_path: Path
) -> None:
    """On the first screen: verdict, end, what came back after preemptions as a bar with figures, and the timeline."""
    story = tell_story(clock_rate=1700)
    path = tmp_path / "page.html"
    log = write_log(tmp_path / "log", story.observed, story.configuration)
    assert run("export", log, "--html", "-o", path).exit_code == 0
    shown = opened(page, path)
    assert shown.evaluate("document.querySelector('.ending').textContent") == "closed; 1 request was open"
    figure = shown.evaluate("document.querySelector('figure').textContent.replace(/\\s+/g, ' ').trim()")
    assert figure.startswith("After 1 preemption: 64 tokens")
    assert "64 recovered: copied back 0 retained in vLLM's cache 0 recomputed" in figure
    whole = shown.evaluate("document.querySelector('.stack').getBoundingClientRect().width")
    assert shown.evaluate("document.querySelector('.t-recovered').getBoundingClientRect().width") == whole
    assert shown.evaluate("document.querySelector('.row.request').getBoundingClientRect().bottom") < 900


def test_idle_time_is_folded_and_the_axis_tells_the_time_of_day(run: Any, page: Page, tmp_path: Path) -> None:
    """An hour between two requests is narrower than they are, and marked with its length; the offset is in a title."""
    driver = serve_many(2)
    place = next(at for at, event in enumerate(driver.observed) if getattr(event, "request_id", "") == "r1")
    events = [
        msgspec.structs.replace(event, time_ns=1000 * event.time_ns + (HOUR_NS if at >= place else 0))
        if hasattr(event, "time_ns")
        else event
        for at, event in enumerate(driver.observed)
    ]
    path = tmp_path / "page.html"
    log = write_log(tmp_path / "log", events, driver.configuration)
    assert run("export", log, "--html", "-o", path).exit_code == 0
    shown = opened(page, path)
    assert "1 h 0 min" in shown.evaluate("document.querySelector('.fold-length').textContent")
    width = "(e) => e.getBoundingClientRect().width"
    assert shown.evaluate(f"({width})(document.querySelector('.grid .fold'))") < 50
    widths = shown.evaluate(
        f"[...document.querySelectorAll('.row.request')].map((e) => ({width})(e.querySelector('rect')))"
    )
    assert min(widths) > 50
    labels = shown.evaluate("[...document.querySelectorAll('.ticks text:not(.fold-length)')].map((e) => e.textContent)")
    assert labels[0].startswith("15:06:40.")
    assert any(label.startswith("16:06:40.") for label in labels)
    assert "ms after log was opened" in labels[0]


def test_the_axis_can_be_zoomed_up_to_the_life_of_one_request(run: Any, page: Page, tmp_path: Path) -> None:
    """Incident: in a log of 19 minutes and 1,500 requests each was drawn a few pixels long."""
    driver = serve_many(1000)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    path = tmp_path / "page.html"
    assert run("export", log, "--html", "-o", path).exit_code == 0
    shown = opened(page, path)
    row = "[...document.querySelectorAll('.row.request')][20]"
    length = (
        f"(() => {{ const e = [...{row}.querySelectorAll('rect')].map((r) => r.getBoundingClientRect());"
        "return Math.max(...e.map((r) => r.right)) - Math.min(...e.map((r) => r.left)); })()"
    )
    labels = "[...document.querySelectorAll('.ticks text')].filter((e) => e.getClientRects().length).length"
    before, num_labels = shown.evaluate(length), shown.evaluate(labels)
    shown.click("[data-zoom=in]")
    shown.click("[data-zoom=in]")
    assert shown.evaluate(length) == pytest.approx(4 * before, rel=0.05)
    assert shown.evaluate(labels) > 2 * num_labels
    shown.click("[data-zoom=all]")
    assert shown.evaluate(length) == pytest.approx(before, rel=0.01)
    shown.evaluate(f"{row}.querySelector('svg').dispatchEvent(new MouseEvent('click', {{ bubbles: true }}))")
    assert shown.evaluate(length) > 30 * before
    label = "document.querySelector('.row.request .label').getBoundingClientRect().left"
    assert shown.evaluate(label) == pytest.approx(
        shown.evaluate("document.querySelector('.timeline').getBoundingClientRect().left"), abs=2
    ), "labels stay while the lanes scroll"


def test_restarts_of_an_engine_are_one_page(run: Any, page: Page, tmp_path: Path) -> None:
    """A table of the logs, and their requests in groups along one axis, also where ids are used again."""
    story = tell_story(clock_rate=1700)
    names = [f"20250615T{15 + number}0640Z-12370-805320" for number in range(2)]
    for number, name in enumerate(names):
        header = {"opened_at_unix_ns": OPENED_AT + number * HOUR_NS}
        log = write_log(tmp_path / "logs" / name, story.observed, story.configuration, header=header)
        (log / "log.end").unlink()
    path = tmp_path / "page.html"
    assert run("export", tmp_path / "logs", "--html", "-o", path).exit_code == 0
    shown = opened(page, path)
    assert shown.evaluate("document.title") == "kvledger · 2 logs of logs"
    cells = "[...e.cells].map((cell) => cell.textContent.trim())"
    rows = f"[...document.querySelectorAll('table.logs tbody tr')].map((e) => {cells})"
    assert [row[0] for row in shown.evaluate(rows)] == names
    assert [row[4:6] for row in shown.evaluate(rows)] == [["end not known", "sound as far as it was read"]] * 2
    assert "128 tokens" in shown.evaluate("document.querySelector('figure').textContent")
    lefts = shown.evaluate(
        f"[...document.querySelectorAll('.row.request')].filter((e) => e.textContent.includes('{REQUEST}'))"
        ".map((e) => e.querySelector('rect').getBoundingClientRect().left)"
    )
    assert len(lefts) == 2
    assert lefts[0] < lefts[1]
    shown.look(width=1100)
    table = "document.querySelector('table.logs')"
    assert shown.evaluate(f"{table}.scrollWidth <= {table}.parentElement.clientWidth"), "its last column is cut off"
    anchors = shown.evaluate("[...document.querySelectorAll('.row.request a')].map((e) => decodeURIComponent(e.hash))")
    assert len(set(anchors)) == 4
    assert all(shown.evaluate(f"document.getElementById({json.dumps(each[1:])}) !== null") for each in anchors)


def test_the_requests_can_be_sorted_by_a_click(run: Any, page: Page, tmp_path: Path) -> None:
    """By number the largest first, a second click turns it round; without scripts the table is in order of arrival."""
    driver = serve_many(3)
    driver.start("long", keys_of("long", 2), 30, (1, 2))
    driver.finish("long", 30, 31)
    driver.ledger.commit()
    path = tmp_path / "page.html"
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    assert run("export", log, "--html", "-o", path).exit_code == 0
    shown = opened(page, path)
    names = "[...document.querySelectorAll('table.sortable tbody')].map((e) => e.rows[0].cells[0].textContent)"
    heading = "[...document.querySelectorAll('table.sortable th')].find((e) => e.textContent === 'prompt')"
    assert shown.evaluate(names) == ["r0", "r1", "r2", "long"]
    for order, first in (("descending", "long"), ("ascending", "r0"), ("descending", "long")):
        shown.evaluate(f"{heading}.querySelector('button').click()")
        assert shown.evaluate(names)[0] == first
        assert shown.evaluate(f"{heading}.ariaSort") == order


def test_the_rows_of_requests_fit_in_1024_pixels_and_name_every_reason(run: Any, page: Page, tmp_path: Path) -> None:
    """Incident: reasons of tokens that were computed twice were missing, and a row had no room for times."""
    rolled_back = Driver(chunk_size=16)
    rolled_back.start("a", keys_of("a", 4), 65, range(1, 6))
    rolled_back.roll_back("a", 33)
    rolled_back.step(("a", 33, 32, 65))
    rolled_back.ledger.commit()
    for hour, driver in enumerate([play_seed(3, 200, chunk_size=16, block_size=16, is_watched=False), rolled_back], 10):
        log = tmp_path / "logs" / f"20250615T{hour}0640Z-12370-805320"
        write_log(log, at_pace(driver.observed), driver.configuration)
    path = tmp_path / "page.html"
    assert run("export", tmp_path / "logs", "--html", "-o", path).exit_code == 0
    shown = opened(page, path)
    shown.look(width=1024)
    table = "document.querySelector('table.sortable')"
    assert shown.evaluate(f"{table}.scrollWidth <= {table}.parentElement.clientWidth")
    assert all(shown.evaluate(f"[...{table}.tBodies].map((e) => Number(e.rows[0].cells[4].dataset.value))"))
    total = run("stats", tmp_path / "logs", "--json").objects("total")[-1]
    assert "rolled_back" in total["computed_twice"]
    reasons = {*total["missed"], *total["recomputed"], *total["computed_twice"]} - BY_DESIGN
    whys = shown.evaluate(f"[...{table}.querySelectorAll('.why')].map((e) => e.textContent.trim())")
    assert {reason for why in whys for reason in re.findall(r"(\w+) [\d,]+", why)} == reasons


def test_a_bar_counts_by_the_names_of_stats(run: Any, tmp_path: Path) -> None:
    """Incident: `new` had one value in the bar, and another one in the table of reasons."""
    driver = play_seed(3, 200, chunk_size=16, block_size=16, is_watched=False)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    path = tmp_path / "page.html"
    assert run("export", log, "--html", "-o", path).exit_code == 0
    found = re.findall(r"<b>([\d,]+)</b> (?:computed: )?([^<]+)</li>", path.read_text())
    shares = {name: int(count.replace(",", "")) for count, name in found}
    (total,) = run("stats", log, "--json").objects("total")
    by_design = {reason: count for reason, count in total["missed"].items() if Reason(reason) in BY_DESIGN}
    assert len(by_design) > 2
    assert shares.items() >= by_design.items()
    assert shares["loaded"] == total["num_tokens_loaded"]
    assert shares["other reasons, see below"] == total["num_tokens_missed"]


def test_ids_that_only_differ_in_the_middle_are_told_apart_and_copied_whole(
    run: Any, page: Page, tmp_path: Path
) -> None:
    """What is left out where there is little room is still there for who selects it or searches for it."""
    ids = [f"chatcmpl-tenant-a-{number:08}-0-completion" for number in (17, 18)]
    story = tell_story(*ids)
    path = tmp_path / "page.html"
    log = write_log(tmp_path / "log", story.observed, story.configuration)
    assert run("export", log, "--html", "-o", path).exit_code == 0
    shown = opened(page, path)
    labels = "[...document.querySelectorAll('.row.request .label')]"
    assert shown.evaluate(f"{labels}.map((e) => e.textContent)") == ids
    assert shown.evaluate(f"{labels}.every((e) => e.scrollWidth <= e.clientWidth)")
    selected = f"(() => {{ getSelection().selectAllChildren({labels}[0]); return getSelection().toString(); }})()"
    assert shown.evaluate(selected) == ids[0]


def test_a_bar_says_what_it_stands_for(story_page: Path) -> None:
    """State, times, causes and tokens, in what the browser shows under the pointer."""
    markup = story_page.read_text()
    titles = [" ".join(title.split()) for title in re.findall(r"<title>(.*?)</title>", markup, flags=re.DOTALL)]
    (preempted,) = [title for title in titles if title.startswith("preempted, ")]
    assert "by request.preempted (event " in preempted
    (load,) = [title for title in titles if title.startswith("load 3: completed")]
    assert "tokens 0–63; 4 pages, 100 B" in load


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_a_page_fits_its_window_and_can_be_read_in_both_colour_schemes(
    page: Page, story_page: Path, scheme: str, width: int
) -> None:
    """Nothing sticks out to the side, and text stands out from what is behind it (WCAG 2: a contrast of 4.5)."""
    shown = opened(page, story_page)
    shown.look(width=width, scheme=scheme)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    contrast = shown.evaluate(
        """(() => {
          const light = (colour) => {
            const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
              .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const behind = (e) => {
            for (; e; e = e.parentElement) {
              const colour = getComputedStyle(e).backgroundColor;
              if (!colour.endsWith(", 0)") && colour !== "transparent") return colour;
            }
            return "rgb(255, 255, 255)";
          };
          const texts = "h1, h2, p, dt, dd, td, th *, summary *, .label, footer p, .verdict, .ending, figcaption, li";
          return [...document.querySelectorAll(texts)]
            .map((e) => {
              const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
              return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.tagName + "." + e.className];
            }).sort((a, b) => a[0] - b[0])[0];
        })()"""
    )
    assert contrast[0] >= 4.5, contrast


def test_a_broken_rule_stands_on_top_with_the_events_that_prove_it(run: Any, tmp_path: Path) -> None:
    """The reader of a ticket sees what is wrong before anything else."""
    story = tell_story()
    events = list(story.observed)
    place = next(
        at for at, event in enumerate(events) if isinstance(event, e.BlocksAllocated) and event.num_external_tokens
    )
    allocated = events[place]
    assert isinstance(allocated, e.BlocksAllocated)
    events[place] = e.BlocksAllocated(allocated.request_id, allocated.block_ids, 80, allocated.time_ns)
    path = tmp_path / "page.html"
    log = write_log(tmp_path / "log", events, story.configuration)
    assert run("export", log, "--html", "-o", path).exit_code == 0
    text = " ".join(" ".join(parsed(path).text).split())
    assert "a rule is broken" in text
    assert f"ALLOC_MATCHES_LOOKUP at event {place + 1}, request {REQUEST}, generation 1" in text
    assert "80 external tokens were claimed, but 64 had been offered" in text
    assert "looked up 65 tokens" in text


def test_every_token_that_was_computed_has_its_reason_on_the_page(run: Any, log: Path, tmp_path: Path) -> None:
    """The table of reasons for the log, and the chain of causes for one request, as `kvledger why` tells them."""
    path = tmp_path / "page.html"
    assert run("export", log, "--html", "-o", path).exit_code == 0
    text = " ".join(" ".join(parsed(path).text).split())
    assert "Why tokens were computed" in text
    assert "110 tokens at 2 admissions = 0 from vLLM's prefix cache + 64 loaded + 46 left to compute" in text
    assert run("export", log, "--html", "-o", path, "--force", "--request", REQUEST).exit_code == 0
    page = " ".join(" ".join(parsed(path).text).split())
    causes = run("why", log, REQUEST, "--json").objects("cause")
    assert causes
    for cause in causes:
        assert " ".join(str(cause["text"]).split()) in page


def test_a_page_about_one_request_shows_that_one_alone(run: Any, log: Path, page: Page, tmp_path: Path) -> None:
    """--request opens its life and draws its time."""
    path = tmp_path / "page.html"
    assert run("export", log, "--html", "--request", "chat-17", "-o", path).exit_code == 0
    shown = opened(page, path)
    assert shown.evaluate("[...document.querySelectorAll('.row.request')].length") == 1
    assert "not read to its end" not in path.read_text(), "what is known of the log is not what its causes need"
    assert shown.evaluate("document.querySelector('details').open") is True
    assert shown.evaluate("document.title") == f"kvledger · {REQUEST}"


def test_of_many_requests_those_with_trouble_are_shown_and_the_rest_is_counted(
    run: Any, page: Page, tmp_path: Path
) -> None:
    """A page of a log with a thousand requests stays one that a browser can handle, and says what it left out."""
    driver = serve_many(1000)
    log = write_log(tmp_path / "log", driver.observed, driver.configuration)
    path = tmp_path / "page.html"
    assert run("export", log, "--html", "-o", path).exit_code == 0
    shown = opened(page, path)
    rows = shown.evaluate("[...document.querySelectorAll('.row.request .label')].map((e) => e.textContent)")
    assert len(rows) == 300
    assert "r777" in rows
    assert rows[0] == "r777", "the worst is on top"
    shown.click("[data-order]")
    rows = shown.evaluate("[...document.querySelectorAll('.row.request .label')].map((e) => e.textContent)")
    assert rows == sorted(rows, key=lambda name: int(name[1:]))
    assert "300 of 1,000 requests are drawn" in shown.evaluate("document.querySelector('#timeline .note').textContent")
    assert path.stat().st_size < 4_000_000


@pytest.mark.scheduler
def test_worlds_become_pages_that_open_without_an_error(
    run: Any, worlds: dict[int, Path], page: Page, tmp_path: Path
) -> None:
    """Also of killed engines, full disks and hundreds of copies; broken rules are on the page."""
    for seed, directory in worlds.items():
        for number, log in enumerate(find_logs(directory)):
            print(f"seed {seed}, log {number}")
            path = tmp_path / f"{seed}-{number}.html"
            assert run("export", log, "--html", "-o", path).exit_code == 0
            shown = opened(page, path)
            verdict = run("verify", "--json", log).objects("verdict")[0]
            num_findings = shown.evaluate("document.querySelectorAll('.finding').length")
            assert bool(num_findings) == bool(verdict["exit_code"])
            shown.click(".row.request .label")
            assert shown.console == []
