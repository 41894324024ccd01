"""The page in a real browser: on a run that trains, on its finished store, on hostile content, on nothing."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_kit import PHONE, WIDE, Browser, gateway, served, until
from dashboard_kit import POLICY, RUN, TINY, call, end, fill, made_run, start
from selenium.webdriver.common.keys import Keys

from harnessrl.gateway.store.sqlite import SqliteStore
from harnessrl.schemas import RunRecord

pytestmark = pytest.mark.slow

UPDATES = 4
SETTINGS = (
    *("engine.max_batch=16", "optim.lr=5e-4", f"train.updates={UPDATES}", "train.eval_every=2"),
    *("collect.groups_in_flight=16", "train.trackers=[]"),
)
HOSTILE = '<script>window.hacked = 1</script><img src="x" onerror="window.hacked = 1">'


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Kept in $HARNESSRL_SCREENSHOTS, if that is set."""
    folder = Path(os.environ.get("HARNESSRL_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def driver(screenshots: Path) -> Iterator[Browser]:
    browser = Browser(screenshots)
    yield browser
    browser.driver.quit()


@pytest.fixture
def browser(driver: Browser) -> Iterator[Browser]:
    driver.driver.get("about:blank")
    driver.resize(WIDE)
    driver.errors()
    yield driver
    assert driver.errors() == []


@pytest.fixture(scope="module")
def finished(driver: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of a run of the tiny model that the browser has watched from its first moment to its end."""
    runs = tmp_path_factory.mktemp("runs")
    command = ["quickstart", "--stay", "--model", TINY, "--", f"runs_dir={runs}", *SETTINGS]
    with served(*command, OMP_NUM_THREADS="1") as process:
        driver.resize(WIDE)
        driver.open(process.says(r"dashboard (\S+/#key=\S+)"))
        driver.see("quickstart", f"of {UPDATES} updates")
        assert "key=" not in driver.js("return location.href")
        driver.see("Groups in flight", "collecting rollouts", f"1 of {UPDATES} updates", "left, until", seconds=600)
        driver.select(".flight .cell")
        driver.screenshot("run-while-training")
        driver.see("live")
        driver.js("location.hash = '#/system'")
        driver.see("Engines", "policy", "answers", "controller")
        driver.js("location.hash = '#/run'")
        shown = driver.see("finished", f"{UPDATES} of {UPDATES} updates", "Where the time goes", seconds=600)
        process.says("(dashboard stays)")
        assert re.search(r"held-out\s+reward\s+0\.\d\d → 0\.\d\d", shown)
        assert driver.errors() == []
    return runs / "quickstart" / "rollouts.db"


@pytest.fixture(scope="module")
def site(finished: Path) -> Iterator[str]:
    with gateway(finished) as address:
        yield address


PAGES = {
    "run": ("/#/run", ["finished", "Where the time goes", "Log-probability gap"]),
    "rollouts": ("/#/rollouts?is_train=true&sort=reward", ["1–50 of", "succeeded", "Policy version"]),
    "groups": ("/#/rollouts?view=groups&sort=spread&is_train=true", ["groups", "Spread"]),
    "system": ("/#/system", ["Engines", "no answer", "Metrics of the gateway"]),
}


EMPTY = {
    "run": ["No run yet", "make quickstart"],
    "rollouts": ["No rollouts yet"],
    "system": ["No engine is registered", "Nobody has reported"],
}


def addresses(browser: Browser, site: str) -> dict[str, tuple[str, list[str]]]:
    """All pages; the best of the run's rollouts and its group too."""
    browser.open(f"{site}/#/rollouts?is_train=true&sort=reward")
    browser.see("1–50 of")
    rollout = browser.js("return document.querySelector('td a').getAttribute('href').split('?')[0]")
    group = rollout.replace("rollout/", "group/").rpartition("-")[0]
    one = ["As the harness saw it", "CALC(", "As the trainer takes it", "trained in this row", "Rows that come"]
    return {**PAGES, "rollout": (f"/{rollout}", one), "group": (f"/{group}", ["mean reward", "advantage"])}


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_each_page_of_a_finished_run(browser: Browser, site: str, theme: str) -> None:
    for name, (address, texts) in addresses(browser, site).items():
        browser.open(site + address, theme)
        browser.see(*texts)
        assert browser.too_wide() <= 0 and browser.nameless() == []
        browser.screenshot(f"{name}-{theme}")


def test_each_page_on_a_phone(browser: Browser, site: str) -> None:
    for name, (address, texts) in addresses(browser, site).items():
        browser.resize(PHONE, 844)
        browser.open(site + address)
        browser.see(*texts)
        assert browser.too_wide() <= 0, name
        browser.screenshot(f"{name}-phone")


def test_a_rollout_is_told_token_by_token(browser: Browser, site: str) -> None:
    browser.open(site + addresses(browser, site)["rollout"][0])
    browser.see("As the trainer takes it")
    spans = "[...document.querySelectorAll('.tokens .trained')]"
    trained = browser.js(f"return {spans}.map((e) => e.textContent).join('')")
    assert trained.startswith("CALC(")
    legends = {"Log-probability": "unlikely", "Policy version": "sampled by version", "Advantage": "good"}
    for colour, legend in legends.items():
        browser.click(colour)
        browser.see(legend)
        assert browser.js("return document.querySelectorAll('.tokens .scaled').length") > 0
    browser.js("document.querySelector('.tokens .scaled').click()")
    shown = browser.see("log-probability", "trained in this row")
    assert re.search(r"token \d+ of \d+ · id \d+", shown)
    before = browser.js("return document.querySelector('.picked').dataset.at")
    browser.select(".tokens").send_keys(Keys.ARROW_RIGHT)
    assert browser.js("return document.querySelector('.picked').dataset.at") == str(int(before) + 1)
    browser.js("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    browser.click("Copy as cURL")
    browser.see("copied")
    assert browser.js("return window.copied").startswith('curl "$OPENAI_BASE_URL/chat/completions"')
    browser.js("URL.createObjectURL = (blob) => (blob.text().then((t) => (window.saved = t)), 'blob:x')")
    browser.js("HTMLAnchorElement.prototype.click = function () { window.file = this.download }")
    browser.click("Download JSON")
    browser.see("Download JSON")
    saved = until(lambda: browser.js("return window.saved && JSON.parse(window.saved)"), bool, "nothing was saved")
    assert set(saved) == {"rollout", "attempts", "events", "calls"} and len(saved["calls"]) == 2


def test_the_keyboard_is_enough(browser: Browser, site: str) -> None:
    browser.open(f"{site}/#/run")
    browser.see("finished")
    body = browser.select("body")
    body.send_keys(Keys.TAB)
    assert browser.js("return document.activeElement.textContent") == "Skip to content"
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.js("return document.activeElement.id") == "main"
    browser.js("document.querySelector('.chart svg').focus()")
    browser.driver.switch_to.active_element.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    browser.see(f"update {UPDATES - 1}: training")
    browser.js("document.querySelectorAll('#nav a')[1].focus()")
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    browser.see("Task or id contains")
    assert browser.js("return document.activeElement.id") == "main"
    field = browser.select("input[type=search]")
    field.send_keys("eval0-3-0")
    browser.see("1–1 of 1 rollouts")
    assert browser.js("return document.activeElement.type") == "search"  # typing goes on
    browser.js("document.querySelector('td a').focus()")
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    browser.see("As the harness saw it", "held-out")
    browser.js("document.querySelector('.tree button').focus()")
    browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.js("return document.activeElement.closest('.tree') !== null")
    browser.driver.back()
    browser.see("1–1 of 1 rollouts")  # the filter is part of the address


def test_a_key_is_asked_for_and_kept_out_of_the_address(driver: Browser, tmp_path: Path) -> None:
    driver.resize(WIDE)
    with gateway(tmp_path / "locked.db", key="open sesame") as address:
        driver.open(f"{address}/#/system")
        driver.see("Sign in", "harnessrl key viewer")
        driver.screenshot("signin-light")
        driver.select("#key").send_keys("wrong", Keys.ENTER)
        driver.see("Invalid or missing API key")
        driver.select("#key").send_keys("open sesame", Keys.ENTER)
        driver.see("Metrics of the gateway", "Sign out")
        assert "sesame" not in driver.js("return location.href + JSON.stringify(localStorage)")
        driver.click("Sign out")
        driver.see("Key of this gateway")


def test_an_empty_store_says_what_to_do(browser: Browser, tmp_path: Path) -> None:
    with gateway(tmp_path / "empty.db") as address:
        for page, texts in EMPTY.items():
            browser.open(f"{address}/#/{page}")
            browser.see(*texts)
            browser.screenshot(f"empty-{page}")
        browser.open(f"{address}/#/nonsense")
        browser.see("There is no such page")


def test_a_gateway_that_goes_away_is_told(driver: Browser, tmp_path: Path) -> None:
    with gateway(tmp_path / "gone.db") as address:
        driver.open(f"{address}/#/system")
        driver.see("Nobody has reported")
    driver.see("no answer")
    driver.js("location.hash = '#/run'")
    driver.see("The gateway does not answer", "Try again")


async def hostile_store(path: Path) -> None:
    store = await SqliteStore.open(path)
    await made_run(store)
    group = f"{RUN}-000009"
    await start(store, f"{group}-0", group, {"question": HOSTILE})
    tool = {"id": HOSTILE, "type": "function", "function": {"name": HOSTILE, "arguments": HOSTILE}}
    messages = [{"role": "system", "content": HOSTILE}, {"role": "user", "content": HOSTILE}]
    answer = {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE, "tool_calls": [tool]}
    function = {"name": "t", "description": HOSTILE, "parameters": {"x": HOSTILE}}
    offered = [{"type": "function", "function": function}]
    await store.add_call(
        call(
            f"{group}-0", 0, [1, 2, 3], HOSTILE, messages, agent=HOSTILE, continuity=f"rendered({HOSTILE})",
            request={"model": "policy", "messages": messages, "tools": offered},
            response={"choices": [{"message": answer}]}, error={"message": HOSTILE},
        )
    )  # fmt: skip
    await store.add_event(f"{group}-0", "0", "log", {"text": HOSTILE, "host": HOSTILE, "path": HOSTILE})
    await store.add_event(f"{group}-0", "0", HOSTILE, {"x": HOSTILE})
    await end(store, f"{group}-0", 1.0, HOSTILE)
    metrics = {"update": 1, "reward/train": 0.5}
    alarm = RunRecord(kind="alarm", at=103, data={"message": f"{HOSTILE}; {HOSTILE}"})
    await store.add_run_records(
        RUN,
        [
            RunRecord(kind="start", at=102, data={"config": {"name": HOSTILE, "model": {"path": HOSTILE}}}),
            RunRecord(kind="metrics", at=102, data=metrics),
            alarm,
            RunRecord(kind="end", at=104, data={"state": "failed", "message": HOSTILE}),
        ],
    )
    await store.put_endpoints([POLICY.model_copy(update={"model": HOSTILE})])
    await store.close()


async def test_what_a_model_writes_stays_text(browser: Browser, tmp_path: Path) -> None:
    await hostile_store(tmp_path / "hostile.db")
    group = f"{RUN}-000009"
    with gateway(tmp_path / "hostile.db") as address:
        for page in ("run", "rollouts", f"rollout/{group}-0", f"group/{group}", "rollouts?view=groups", "system"):
            browser.open(f"{address}/#/{page}")
            browser.see("<script>window.hacked = 1</script>")
            browser.js("document.querySelectorAll('details').forEach((d) => (d.open = true))")
            assert browser.js("return window.hacked ?? null") is None, page
            assert browser.js("return document.querySelectorAll('main script, main img').length") == 0, page
            browser.screenshot(f"hostile-{page.partition('/')[0].partition('?')[0]}")


async def test_a_long_conversation_with_a_fork(browser: Browser, tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "made.db")
    await made_run(store)
    await end(store, f"{RUN}-000001-3", 0.0)
    await store.close()
    with gateway(tmp_path / "made.db") as address:
        browser.open(f"{address}/#/rollout/{RUN}-000001-0")
        browser.see("rendered(compaction)", "shares 2 tokens with call 1", "row 2 of 2", "agent began")
        browser.screenshot("fork")
        browser.js("document.querySelector('.tree button').click()")
        browser.see("row 1 of 2")
        browser.open(f"{address}/#/rollout/{RUN}-000001-2")
        browser.see("Failed:", "exit code 3")
        browser.open(f"{address}/#/run")
        browser.see("no trainer is reporting", "harnessrl train --resume")


async def test_ten_thousand_rollouts_stay_smooth(browser: Browser, tmp_path: Path) -> None:
    store = await SqliteStore.open(tmp_path / "many.db")
    await fill(store, 10_000)
    await store.close()
    with gateway(tmp_path / "many.db") as address:
        browser.open(f"{address}/#/rollouts")
        browser.see("of 10,000 rollouts")
        browser.screenshot("many")
        field = browser.select("input[type=search]")
        for text, expected in (("task number 77", "of 88 rollouts"), ("task number 1234,", "1–8 of 8 rollouts")):
            field.clear()
            field.send_keys(text)
            browser.see(expected)
            took = browser.js("return document.querySelector('[data-milliseconds]').dataset.milliseconds")
            print(f"{text}: asked, answered and drawn in {took} ms")
        browser.click("Groups")
        browser.see("1–1 of 1 groups")
