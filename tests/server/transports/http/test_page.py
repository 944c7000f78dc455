"""The page in a real browser, called by nobody but itself, against a server with the shipped models."""

from __future__ import annotations

import ast
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from PIL import Image

pytest.importorskip("playwright.sync_api", reason="needs playwright")
axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")

from every_task import copy_bundle  # noqa: E402 (see above)
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright  # noqa: E402
from tiny_answers import write_answer_bundle, write_mask_bundle  # noqa: E402
from tiny_bundles import write_box_bundle, write_map_bundle, write_named_box_bundle  # noqa: E402
from tiny_segmenter import write_segmenter_bundle  # noqa: E402
from tiny_transcriber import tones, write_wav  # noqa: E402

from headway_server.bundles import Task  # noqa: E402

MODELS = Path(__file__).parents[4] / "models"
NUM_MODELS = len(list(MODELS.glob("*/1/bundle.json")))
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
GROUPS = {
    "Text": ["generate", "rewrite", "translate", "classify", "tag", "answer", "fill", "compare", "rank"],
    "Image": ["images", "detect", "segment", "maps", "caption", "draw", "videos"],
    "Speech": ["transcribe", "speak", "sounds"],
    "Inspect": ["attention"],
    "Operate": ["models", "server"],
}
PANELS = [panel for panels in GROUPS.values() for panel in panels]
WIDTHS = [320, 360, 768, 800, 820, 1180]
"""Pixels of screens that every panel fits."""
WITHOUT_MODEL = ["rewrite", "answer", "fill", "maps", "videos", "sounds"]
"""Panels for which no model is shipped."""

pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="needs a Chromium: apt-get install chromium"),
    pytest.mark.skipif(not (MODELS / "shakespeare").is_dir(), reason="needs the shipped models"),
    pytest.mark.timeout(120),
]


@contextmanager
def running(*arguments: str, store: Path = MODELS) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs a server; gives its process and the page's address."""
    command = [sys.executable, "-m", "headway_server", "--store", str(store), "--port", "0", "--log-level", "warning"]
    with subprocess.Popen([*command, "--http-port", "0", *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http=(\S+)", process.stdout.readline())
        assert found is not None, "the server says where its page is"
        try:
            yield process, f"http://{found[1]}/"
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running("--metrics-port", "0") as (_, url):
        yield url


@pytest.fixture(scope="module")
def maker_address(
    diffusion_store: Path, text_diffusion_store: Path, voice_store: Path, tmp_path_factory: Any
) -> Iterator[str]:
    """A server with tiny models that draw and speak."""
    store = tmp_path_factory.mktemp("makers")
    for each in (diffusion_store, text_diffusion_store, voice_store):
        shutil.copytree(each, store, dirs_exist_ok=True)
    with running(store=store) as (_, url):
        yield url


@pytest.fixture(scope="module")
def topics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with one of the shipped models, for servers that start for one test."""
    store = tmp_path_factory.mktemp("topics")
    shutil.copytree(MODELS / "ag-news", store / "ag-news")
    return store


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # root may not sandbox
        arguments += ["--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream"]  # a microphone that beeps
        launched = playwright.chromium.launch(executable_path=BROWSER, args=arguments)
        yield launched
        launched.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that must not make mistakes of its own."""
    context = browser.new_context(viewport={"width": 1100, "height": 900})
    opened = context.new_page()
    mistakes: list[str] = []
    opened.on("pageerror", lambda error: mistakes.append(str(error)))
    opened.on("console", lambda message: mistakes.append(message.text) if "Content Security" in message.text else None)
    yield opened
    context.close()
    assert not mistakes


def open_panel(page: Page, address: str, panel: str) -> None:
    page.goto(f"{address}#/{panel}")
    page.wait_for_selector("#panel-title")


def go_to(page: Page, panel: str) -> None:
    """Opens a panel by the links of the page: its group's, then its own."""
    [group] = [name for name, panels in GROUPS.items() if panel in panels]
    page.locator("#groups").get_by_role("link", name=group).click()
    page.locator(f'#tabs a[href="#/{panel}"]').click()
    expect(page.locator(f".panel.{panel}")).to_be_visible()


def answer(page: Page) -> str:
    """Calls, waits for the answer, and returns it as text."""
    page.locator("main form button.primary").click()
    expect(page.locator("main form")).not_to_have_attribute("aria-busy", "true", timeout=20_000)
    return page.locator(".output").inner_text()


def answer_of_shown_command(page: Page) -> Any:
    """Runs the command for the call that a panel made, and returns what it answers."""
    page.get_by_text("The call of this panel").click()
    command = page.locator(".commands code").inner_text()
    run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=20, check=True)
    return json.loads(run.stdout)


def downloaded(page: Page, link: str) -> tuple[str, bytes]:
    """Follows the first link of that text; returns the name and the bytes of the file that comes."""
    with page.expect_download() as download:
        page.get_by_role("link", name=link).first.click()
    return download.value.suggested_filename, download.value.path().read_bytes()


def is_accessible_and_fits(page: Page) -> bool:
    """Asks axe, and whether the page is as wide as the screen."""
    found = axe.Axe().run(page)
    assert not found.response["violations"], found.generate_report()
    size = page.viewport_size
    return size is not None and page.evaluate("document.documentElement.scrollWidth") <= size["width"]


def stop_when_there_is(page: Page, selector: str) -> None:
    """Has the panel's Stop clicked in the page itself: an answer may be whole before a click from here comes."""
    page.evaluate(
        """(selector) => new MutationObserver((changes, observer) => {
            if (!document.querySelector(selector)) return;
            observer.disconnect();
            [...document.querySelectorAll("button")].find((each) => each.textContent === "Stop").click();
        }).observe(document.body, { childList: true, subtree: true, attributes: true })""",
        selector,
    )


def look_into(page: Page) -> None:
    """Opens the viewer of attention below the first answer."""
    page.get_by_role("button", name="Attention").first.click()
    expect(page.locator(".attention-view .multiples button").first).to_be_visible(timeout=20_000)


def test_the_first_panel_shows_every_model_with_its_quality(page: Page, address: str) -> None:
    open_panel(page, address, "models")
    assert page.locator(".card").count() == NUM_MODELS
    assert "sacrebleu" in page.locator(".card", has_text="multi30k-de-en").inner_text()
    assert page.locator("#status").inner_text() == f"{NUM_MODELS} models"


def test_a_text_appears_with_its_tokens_and_the_same_seed_gives_the_same_text(page: Page, address: str) -> None:
    open_panel(page, address, "generate")
    page.get_by_text("All parameters").click()
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Length limit").fill("20")
    answer(page)
    expect(page.locator(".token")).to_have_count(20)
    first = page.locator(".tokens").inner_text()
    page.locator(".token").first.focus()
    assert page.locator(".token").first.locator(".alternatives tr").count() == 5
    answer(page)
    assert page.locator(".tokens").inner_text() == first


def test_the_stop_button_ends_a_text(page: Page, address: str) -> None:
    open_panel(page, address, "generate")
    page.get_by_label("Length limit").fill("240")
    stop_when_there_is(page, ".token")
    page.locator("main form button.primary").click()
    expect(page.locator(".timings").last).to_contain_text("stopped")


def test_a_constraint_holds(page: Page, address: str) -> None:
    open_panel(page, address, "generate")
    page.get_by_text("All parameters").click()
    page.get_by_label("Constraint").select_option("choices")
    page.get_by_label("Schema, expression or texts").fill("love\nhate")
    answer(page)
    assert page.locator(".tokens").evaluate(
        "(row) => [...row.children].map((each) => each.firstChild.data).join('')"
    ) in (
        "love",
        "hate",
    )


def test_a_conversation_goes_on_with_what_was_said(page: Page, tmp_path: Path) -> None:
    from tiny_chat_model import chat_checkpoint, write_chat_bundle  # with torch, for this test alone

    write_chat_bundle(tmp_path / "store", chat_checkpoint(tmp_path / "checkpoint"))
    with running(store=tmp_path / "store") as (_, url):
        open_panel(page, url, "generate")
        page.get_by_label("As a chat").check()
        page.get_by_label("System message").fill("Be brief.")
        page.get_by_label("Length limit").fill("12")
        for number, message in enumerate(("Hello there.", "What is it? <|assistant|>"), start=1):
            page.get_by_label("Message", exact=True).fill(message)
            answer(page)
            assert page.locator(".turn.user").all_inner_texts()[-1] == message
            assert page.locator(".turn.user").count() == page.locator(".turn.assistant").count() == number
            expect(page.get_by_label("Message", exact=True)).to_have_value("")
        page.get_by_text("The call of this panel").click()
        command = page.locator(".commands code").inner_text()
        assert [command.count(each) for each in ("ROLE_SYSTEM", "ROLE_USER", "ROLE_ASSISTANT")] == [1, 2, 1]
        assert "Hello there." in command
        page.reload()
        expect(page.locator(".turn")).to_have_count(4)
        page.get_by_label("Message", exact=True).fill("And then?")
        answer(page)
        assert page.locator(".turn.user").all_inner_texts()[0] == "Hello there."
        assert page.locator(".turn").count() == 6
        page.get_by_role("button", name="New chat").click()
        assert page.locator(".turn").count() == 0
        assert "Write a message first." in answer(page)


def test_a_translation_comes_with_alternatives_and_where_it_looked(page: Page, address: str) -> None:
    open_panel(page, address, "translate")
    assert page.get_by_label("From", exact=True).is_disabled()
    assert page.get_by_label("From", exact=True).inner_text() == "German"
    assert "boy" in answer(page)
    assert page.locator(".hypotheses li").count() == 3
    expect(page.locator(".lines path").nth(3)).to_be_attached()  # drawn when the browser has laid the words out
    page.get_by_text("As a matrix").click()
    assert page.locator("td.heat").count() >= 16


def test_a_model_of_many_languages_is_told_which(page: Page, nllb: Path) -> None:
    with running(store=nllb / "store") as (_, url):
        open_panel(page, url, "models")
        assert "3 languages to 3 languages" in page.locator(".card").inner_text()
        open_panel(page, url, "translate")
        source, target = page.get_by_label("From", exact=True), page.get_by_label("To", exact=True)
        assert source.locator("option").all_inner_texts() == ["English (Latin)", "French (Latin)", "German (Latin)"]
        assert (source.input_value(), target.input_value()) == ("eng-Latn", "deu-Latn")
        source.select_option("fra-Latn")
        page.get_by_label("Text", exact=True).fill("the rain")
        page.get_by_label("Beams").fill("1")
        page.get_by_label("Translations", exact=True).fill("1")
        assert "problem" not in answer(page)
        assert page.locator(".hypotheses li").count() == 1
        assert page.locator(".problem").count() == 0
        page.get_by_text("The call of this panel").click()
        command = page.locator(".commands code").inner_text()
        assert '"sourceLanguage":"fra-Latn","targetLanguage":"deu-Latn"' in command.replace(" ", "")


def test_texts_get_labels(page: Page, address: str) -> None:
    open_panel(page, address, "classify")
    assert "Business" in answer(page)
    assert page.locator(".result").count() == 3


def test_words_get_tags(page: Page, address: str) -> None:
    open_panel(page, address, "tag")
    assert "NOUN" in answer(page)


def test_answers_are_marked_in_a_text_and_masks_filled(page: Page, tmp_path: Path) -> None:
    write_answer_bundle(tmp_path / "store")
    write_mask_bundle(tmp_path / "store")
    with running(store=tmp_path / "store") as (_, url):
        open_panel(page, url, "answer")
        page.get_by_label("Text").fill("the Ada Lovelace saw Oslo")
        assert "Ada Lovelace" in answer(page)
        expect(page.locator("mark")).to_contain_text("Ada Lovelace")
        page.get_by_label("No-answer threshold").fill("-1")
        assert "No answer" in answer(page)
        open_panel(page, url, "fill")
        page.get_by_label("Text").fill("the [MASK] saw a [MASK]")
        answer(page)
        expect(page.locator(".quote")).to_have_text(["the sea saw a [MASK]", "the [MASK] saw a star"])
        page.get_by_label("Targets").fill("goal, star")
        answer(page)
        expect(page.locator(".bars li")).to_have_count(4)


def test_texts_of_a_kind_are_near_each_other(page: Page, address: str) -> None:
    open_panel(page, address, "compare")
    answer(page)
    near, far = (float(page.locator("td.heat").nth(index).inner_text()) for index in (1, 2))
    assert near > 0.5 > far
    look_into(page)


def test_a_picture_gets_labels(page: Page, address: str, tmp_path: Path) -> None:
    Image.new("RGB", (48, 32), (90, 140, 220)).save(tmp_path / "sky.png")
    open_panel(page, address, "images")
    page.set_input_files("input[type=file]", str(tmp_path / "sky.png"))
    expect(page.locator(".output .bars li")).to_have_count(5, timeout=10_000)
    look_into(page)
    expect(page.locator(".attention-view h4")).to_have_text("all layers")
    expect(page.locator(".attention-view .multiples .overlay")).to_have_count(5)  # the mean over all, and of each layer
    page.get_by_label("Heads").select_option("ATTENTION_SUMMARY_UNSPECIFIED")
    expect(page.locator(".attention-view .multiples")).to_have_count(4)  # layers, with 4 heads each
    expect(page.locator(".attention-view .multiples .overlay")).to_have_count(16)
    page.get_by_label("Heads").select_option("ATTENTION_SUMMARY_ROLLOUT")
    expect(page.locator(".attention-view .multiples .overlay")).to_have_count(1)


def test_objects_get_boxes_over_the_picture(page: Page, tmp_path: Path) -> None:
    write_box_bundle(tmp_path / "store")
    Image.new("RGB", (80, 40), (200, 135, 60)).save(tmp_path / "photo.png")
    with running(store=tmp_path / "store") as (_, url):
        open_panel(page, url, "detect")
        page.get_by_label("Picture").set_input_files(tmp_path / "photo.png")
        expect(page.locator(".output .bars li")).to_have_count(1, timeout=10_000)
        expect(page.locator(".output .bars li")).to_contain_text("red")
        box = page.locator(".marks rect")  # in the upper left quarter
        assert [float(box.get_attribute(side) or "") for side in ("x", "y", "width", "height")] == [0, 0, 40, 20]
        page.get_by_label("Labels").fill("green")
        assert "No object" in answer(page)
        page.get_by_label("Threshold").fill("0.2")
        assert "green" in answer(page)
        assert is_accessible_and_fits(page)


def test_maps_are_drawn_over_the_picture(page: Page, tmp_path: Path) -> None:
    write_map_bundle(tmp_path / "store")
    write_map_bundle(tmp_path / "store", Task.DEPTH_ESTIMATION, name="depths")
    picture = np.zeros((40, 80, 3), np.uint8)
    picture[:, :40, 0] = picture[:, 40:, 2] = 200
    Image.fromarray(picture).save(tmp_path / "photo.png")
    with running(store=tmp_path / "store") as (_, url):
        open_panel(page, url, "maps")
        page.get_by_label("Model").select_option("maps/1")
        page.get_by_label("Picture").set_input_files(tmp_path / "photo.png")
        expect(page.locator(".output .bars li")).to_have_count(2, timeout=10_000)
        expect(page.locator(".output .bars li").first).to_contain_text("50.0 %")
        at = "([x, y]) => [...document.querySelector('canvas').getContext('2d').getImageData(x, y, 1, 1).data]"
        assert page.evaluate(at, [9, 9]) != page.evaluate(at, [70, 30])
        page.get_by_label("Model").select_option("depths/1")
        assert "(white), metres" in answer(page)
        assert is_accessible_and_fits(page)


def test_objects_of_any_label_are_looked_for_by_a_model_without_labels(page: Page, tmp_path: Path) -> None:
    write_named_box_bundle(tmp_path / "store")
    Image.new("RGB", (80, 40), (200, 135, 60)).save(tmp_path / "photo.png")
    with running(store=tmp_path / "store") as (_, url):
        open_panel(page, url, "detect")
        expect(page.get_by_label("Labels")).to_have_value("a person, a dog, a red car")
        page.get_by_label("Picture").set_input_files(tmp_path / "photo.png")
        expect(page.locator(".output .bars li").first).to_contain_text("a red car", timeout=10_000)
        page.get_by_label("Labels").fill("red green, blue")
        assert "red green" in answer(page)
        page.get_by_label("Labels").fill("")
        page.get_by_role("button", name="Find").click()
        expect(page.locator(".problem")).to_contain_text("has no labels of its own", timeout=10_000)


def test_a_token_shows_what_it_looks_at_to_who_points_at_it_or_steps_to_it(page: Page, address: str) -> None:
    open_panel(page, address, "tag")
    answer(page)
    look_into(page)
    reading = page.locator(".attention-tokens .timings").first
    expect(reading).to_contain_text("Together they attend to")
    page.locator(".attention-tokens .word", has_text="sea").hover()
    expect(reading).to_contain_text("sea attends to")
    page.locator(".attention-tokens .word").first.focus()
    page.keyboard.press("ArrowRight")
    expect(reading).to_contain_text("The attends to")
    page.get_by_label("Heads").select_option("ATTENTION_SUMMARY_UNSPECIFIED")
    page.get_by_role("button", name="layer 2, head 1").click()
    expect(page.locator(".attention-view h4")).to_have_text("layer 2, head 1")


@pytest.mark.parametrize("width", WIDTHS)
def test_groups_lead_to_every_panel_by_mouse_and_keyboard(browser: Browser, address: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800})
    page = context.new_page()
    open_panel(page, address, "server")
    groups, tabs = page.locator("#groups a"), page.locator("#tabs a")
    expect(page.locator("#groups a[aria-current]")).to_have_text("Operate")
    for group, panels in GROUPS.items():
        page.locator("#groups").get_by_role("link", name=group).click()
        expect(page.locator("#groups a[aria-current]")).to_have_text(group)
        assert [link.get_attribute("href") for link in tabs.all()] == [f"#/{panel}" for panel in panels]
        for link in [*groups.all(), *tabs.all()]:
            box = link.bounding_box()
            assert box is not None
            assert 0 <= box["x"] <= box["x"] + box["width"] <= width
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    expect(page.locator(".panel.server")).to_be_visible()  # a group opens the panel that was open in it
    groups.first.focus()
    page.keyboard.press("Enter")
    expect(page.locator(".panel.generate")).to_be_visible()
    page.keyboard.press("Tab")  # over the other groups
    while not page.evaluate("document.activeElement.matches('#tabs a')"):
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    expect(page.locator(".panel.translate")).to_be_visible()
    expect(page.locator("#main")).to_be_focused()
    context.close()


def test_the_servers_figures_appear(page: Page, address: str) -> None:
    open_panel(page, address, "server")
    expect(page.locator(".metrics")).to_contain_text("MiB", timeout=10_000)


def test_the_call_is_shown_as_a_command_that_works(page: Page, address: str) -> None:
    open_panel(page, address, "classify")
    answer(page)
    assert answer_of_shown_command(page)["results"][0]["labels"][0]["label"] == "Business"


def test_commands_name_the_port_of_grpc_that_the_server_has(page: Page, address: str) -> None:
    open_panel(page, address, "classify")
    port = page.locator('meta[name="grpc-port"]').get_attribute("content")
    assert port != "50051"
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(timeout=20)
    answer(page)
    page.get_by_text("The call of this panel").click()
    for kind in ("Python", "gRPC"):
        page.get_by_label(kind, exact=True).check()
        assert f"127.0.0.1:{port}" in page.locator(".commands code").inner_text()


@pytest.mark.parametrize(
    "shown",
    [
        ("translate", "Python", "boy"),
        ("segment", "curl", "predictedIou"),
        ("segment", "Python", "predicted_iou"),
        ("images", "Python", "LabelScore"),
        ("generate", "OpenAI", "\n"),
        ("compare", "OpenAI", "[["),
        ("draw", "OpenAI", ""),
        ("speak", "OpenAI", ""),
    ],
)
def test_the_shown_calls_run(page: Page, address: str, tmp_path: Path, shown: tuple[str, str, str]) -> None:
    """Each as a panel, a kind of command, and a part of what that writes."""
    panel, kind, told = shown
    Image.new("RGB", (256, 256), (90, 140, 220)).save(tmp_path / "picture.png")
    open_panel(page, address, panel)
    page.get_by_role("button", name="Show an example").click()
    expect(page.locator(".results .timings").first).to_be_attached(timeout=20_000)
    expect(page.locator("main form.call")).not_to_have_attribute("aria-busy", "true", timeout=20_000)
    page.get_by_text("The call of this panel").click()
    page.get_by_label(kind, exact=True).check()
    command = [*(["bash"] if kind == "curl" else [sys.executable]), "-c", page.locator(".commands code").inner_text()]
    run = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert told in run.stdout


SHOWN = """async ([kind, call]) => {
    const { commands } = await import("/commands.js");
    const shown = commands(call);
    const label = [...shown.querySelectorAll("label")].find((each) => each.textContent.trim() === kind);
    label.firstChild.dispatchEvent(new Event("change"));
    return shown.querySelector("code").textContent;
}"""
HOSTILE = "\ue000x; touch made #\ue000 $(touch made) `touch made` ' \" \\ ${HOME} \nEND\ntouch made\n"


@pytest.mark.parametrize("kind", ["curl", "gRPC"])
@pytest.mark.parametrize("files", [{}, {"images": ["cG5n"], "mask": "cG5n"}])
def test_no_text_of_a_request_is_run_by_a_shown_command(
    page: Page, address: str, tmp_path: Path, kind: str, files: dict[str, Any]
) -> None:
    """Runs the command with programs in place of curl and grpcurl that write the message they would send."""
    program = '#!/bin/bash\nuntil [ "$1" = -d ]; do shift; done\ncase "$2" in @*) cat ;; *) printf %s "$2" ;; esac\n'
    for name in ("curl", "grpcurl"):
        (tmp_path / name).write_text(program)
        (tmp_path / name).chmod(0o755)
    for name in ("picture.png", "mask.png"):
        (tmp_path / name).write_bytes(b"png")
    open_panel(page, address, "models")
    request = {"model": HOSTILE, "texts": [HOSTILE], HOSTILE: 1, "constructor": "a", **files}
    command = page.evaluate(SHOWN, [kind, {"service": "A", "method": "ClassifyImage", "request": request}])
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == request
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "shown",
    [
        ("Python", "ClassifyTokens", {"pages": [{"words": [HOSTILE], "a=print()": None, "b": 1}]}, "Page("),
        ("Python", "GenerateText", {"prompts": [HOSTILE], "parameters": {"sampling": {"seed": "007"}}}, "seed=7,"),
        ("Python", "GenerateText", {"parameters": {"sampling": {"seed": str(2**64 - 1)}}}, f"seed={2**64 - 1}"),
        ("OpenAI", "GenerateText", {"prompts": [HOSTILE], "parameters": {"sampling": {"seed": "1e2"}}}, "seed=100,"),
    ],
)
def test_no_text_of_a_request_is_code_in_a_shown_program(
    page: Page, address: str, shown: tuple[str, str, dict[str, Any], str]
) -> None:
    """Each a kind of command, a method, its fields, and a part of the program."""
    kind, method, fields, told = shown
    open_panel(page, address, "models")
    request = {"model": HOSTILE, **fields}
    program = page.evaluate(SHOWN, [kind, {"service": "A", "method": method, "request": request}])
    called = [ast.unparse(node.func) for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)]
    clients = ["client.classify_tokens", "client.generate_text", "client.completions.create"]
    assert set(called) <= {"Client", "OpenAI", "Page", "print", *clients}
    assert told in program


def test_what_was_written_chosen_and_answered_is_there_when_a_panel_is_opened_again(page: Page, address: str) -> None:
    open_panel(page, address, "classify")
    texts = page.locator("main textarea").first
    texts.fill("The rocket has reached the moon.")
    found = answer(page)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for panel in ("models", "server", "tag", "classify"):
        go_to(page, panel)
    expect(page.locator("main textarea").first).to_have_value("The rocket has reached the moon.")
    assert page.locator(".output").inner_text() == found
    assert not any("ClassifyText" in url for url in requests)


def test_inputs_pictures_and_masks_survive_a_reload(page: Page, address: str, tmp_path: Path) -> None:
    Image.new("RGB", (60, 40), (90, 140, 220)).save(tmp_path / "small.png")
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png")  # 2.4 MB: more than is kept
    opacity = "() => document.querySelector('.overlay canvas').getContext('2d').getImageData(30, 20, 1, 1).data[3]"
    open_panel(page, address, "classify")
    page.locator("main textarea").first.fill("The rocket has reached the moon.")
    go_to(page, "caption")
    page.get_by_label("Picture").set_input_files(tmp_path / "large.png")
    go_to(page, "segment")
    page.get_by_label("Picture").set_input_files(tmp_path / "small.png")
    expect(page.locator(".overlay")).to_be_visible()
    page.get_by_label("Points inside").fill("30,20")
    go_to(page, "draw")
    page.get_by_label("Seed").fill("7")
    page.get_by_text("Edit an image").click()
    page.get_by_label("Picture").set_input_files(tmp_path / "small.png")
    page.get_by_label("Strength").fill("0.5")
    page.locator(".overlay").click()
    page.get_by_label("Strength").fill("0.6")
    assert page.evaluate(opacity) > 0
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.rpartition("/")[2]))
    page.reload()
    expect(page.locator(".panel.draw .overlay")).to_be_visible()
    assert page.evaluate(opacity) > 0, "the mask is painted again"
    assert page.get_by_label("Seed").input_value() == "7"
    assert page.get_by_label("Strength").input_value() == "0.6"
    go_to(page, "segment")
    expect(page.locator(".overlay")).to_be_visible()
    assert page.get_by_label("Points inside").input_value() == "30,20"
    go_to(page, "caption")
    assert page.get_by_label("Picture").evaluate("(input) => input.files.length") == 0
    go_to(page, "classify")
    expect(page.locator("main textarea").first).to_have_value("The rocket has reached the moon.")
    assert not {"SegmentImage", "StreamGenerateImage", "CaptionImage", "ClassifyText"} & set(asked)
    assert page.evaluate("Object.values(sessionStorage).join('').length") < 3 * 2**20


@pytest.mark.parametrize("kept", ["{}", "5", "[1]", "no JSON", '[["painted", "5"], ["turns", "[null]"]]'])
def test_kept_inputs_of_another_form_are_forgotten(page: Page, address: str, kept: str) -> None:
    page.goto(address)
    page.evaluate(
        """(kept) => {
            for (const panel of ["draw", "generate"]) sessionStorage.setItem(`headway-form:${panel}`, kept);
            const picture = JSON.stringify([{ name: "a.png", url: "data:image/png,%" }]);
            for (const one of [kept, picture]) sessionStorage.setItem("headway-pictures:draw:picture", one);
        }""",
        kept,
    )
    for panel in ("draw", "generate"):
        go_to(page, panel)
        expect(page.locator("main form button.primary")).to_be_enabled()
    assert page.evaluate("sessionStorage.getItem('headway-pictures:draw:picture')") is None


@pytest.mark.parametrize("way", ["the button", "another picture"])
def test_a_cleared_mask_stays_cleared(page: Page, address: str, tmp_path: Path, way: str) -> None:
    for name in ("one.png", "two.png"):
        Image.new("RGB", (60, 40), (90, 140, 220)).save(tmp_path / name)
    open_panel(page, address, "draw")
    page.get_by_text("Edit an image").click()
    page.get_by_label("Picture").set_input_files(tmp_path / "one.png")
    page.get_by_label("Boxes to inpaint").fill("10,10,40,30")
    page.locator(".overlay").click()
    expect(page.get_by_label("Strength")).to_have_value("1")
    if way == "the button":
        page.get_by_role("button", name="Clear the mask").click()
    else:
        page.get_by_label("Picture").set_input_files(tmp_path / "two.png")
    for _ in range(2):
        expect(page.locator(".overlay")).to_be_visible()
        expect(page.get_by_label("Strength")).to_have_value("0.8")
        expect(page.get_by_label("Boxes to inpaint")).to_have_value("")
        assert page.locator("[name=painted]").input_value() == "[]"
        if way == "the button":
            page.reload()


@pytest.mark.parametrize("panel", ["segment", "draw"])
def test_the_picture_that_was_chosen_last_is_the_one_that_counts(
    page: Page, address: str, tmp_path: Path, panel: str
) -> None:
    Image.new("RGB", (60, 40), (90, 140, 220)).save(tmp_path / "photo.png")
    open_panel(page, address, panel)
    page.evaluate(
        """async (bytes) => {
            const { give } = await import("/images.js");
            const input = document.querySelector("input[type=file]");
            const content = Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0));
            for (const part of [content, content.slice(0, 20), content]) give(input, [new File([part], "a.png")]);
        }""",
        base64.b64encode((tmp_path / "photo.png").read_bytes()).decode(),
    )
    expect(page.locator(".overlay")).to_be_visible()
    if panel == "segment":
        page.get_by_label("Points inside").fill("20,20")
    answer(page)
    expect(page.locator(".problem")).to_have_count(0)
    page.get_by_text("The call of this panel").click()
    expect(page.locator(".commands code").first).to_contain_text("picture.png")


def test_a_model_that_tells_nothing_of_itself_has_every_panel(page: Page, address: str) -> None:
    told = ("description", "maxInputTokenCount", "maxTokenCount", "labels", "embeddingDimension")

    def without(route: Route) -> None:
        models = route.fetch().json()["models"]
        route.fulfill(json={"models": [{name: one[name] for name in one if name not in told} for one in models]})

    page.route("**/ListModels", without)
    for panel in PANELS:
        open_panel(page, address, panel)
        assert "undefined" not in page.locator("main").inner_html(), panel


def test_an_empty_answer_card_shows_an_example(page: Page, address: str) -> None:
    for panel in PANELS:
        if panel in (*WITHOUT_MODEL, "models", "server"):
            continue
        open_panel(page, address, panel)
        expect(page.locator(".blank")).to_contain_text("The answer appears here.")
        page.get_by_role("button", name="Show an example").click()
        expect(page.locator(".results .timings").first).to_be_attached(timeout=20_000)
        expect(page.locator("main form.call")).not_to_have_attribute("aria-busy", "true", timeout=20_000)
        expect(page.locator(".blank, .problem")).to_have_count(0)
        expect(page.locator(".answers > div .commands code")).to_contain_text('"modelVersion":"1"')


def test_every_panel_tells_a_limit_of_its_model(page: Page, address: str) -> None:
    for panel, told in {
        "classify": "Reads up to 128 tokens · 4 labels",
        "generate": "with the answer",
        "draw": "10 classes",
        "segment": "Cuts out of a picture",
    }.items():
        open_panel(page, address, panel)
        expect(page.locator(".limits")).to_contain_text(told)


def test_what_is_worked_on_stands_large_in_the_answer_card(page: Page, address: str) -> None:
    open_panel(page, address, "segment")
    page.get_by_role("button", name="Show an example").click()
    expect(page.locator(".candidate")).to_have_count(3, timeout=20_000)
    assert page.locator(".output .overlay").evaluate("(node) => node.offsetWidth") >= 400
    edge = page.locator(".marks path").first
    first = edge.get_attribute("d")
    page.locator(".candidate").last.click()
    expect(page.locator(".candidate").last).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".candidate").last).to_contain_text(re.compile(r"predicted IoU [\d.]+\s*stability [\d.]+"))
    assert edge.get_attribute("d") != first
    open_panel(page, address, "draw")
    page.get_by_role("button", name="Show an example").click()
    drawn = page.locator(".gallery img.pixelated")
    expect(drawn).to_have_attribute("src", re.compile("^blob:"), timeout=20_000)
    assert drawn.evaluate("(image) => [image.naturalWidth, image.width > 250]") == [28, True]


@pytest.mark.parametrize("width", [360, 1180])
def test_labels_of_tagged_words_stay_in_the_card(browser: Browser, address: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800})
    page = context.new_page()
    open_panel(page, address, "tag")
    answer(page)
    card = page.locator(".output").bounding_box()
    assert card is not None
    for mark in page.locator("mark small").all():
        box = mark.bounding_box()
        assert box is not None
        assert card["x"] < box["x"]
        assert box["x"] + box["width"] < card["x"] + card["width"]
        assert box["y"] + box["height"] < card["y"] + card["height"]
    context.close()


def test_a_telephone_scrolls_to_the_answer(browser: Browser, address: str) -> None:
    context = browser.new_context(viewport={"width": 360, "height": 640}, reduced_motion="reduce")
    page = context.new_page()
    open_panel(page, address, "translate")
    button = page.locator("main form button.primary")
    button.focus()
    page.evaluate("scrollTo(0, 0)")
    page.keyboard.press("Control+Enter")
    expect(page.locator(".hypotheses")).to_be_in_viewport()
    context.close()


def test_texts_are_ranked_and_rewritten(page: Page, address: str, tmp_path: Path) -> None:
    copy_bundle(
        MODELS / "multi30k-de-en" / "1", tmp_path / "store", "rewriter", {}, task=Task.TEXT_TO_TEXT, languages=None
    )
    open_panel(page, address, "rank")
    page.get_by_label("Model").select_option("ag-news/1")
    page.get_by_label("Query").fill("The striker scored twice")
    assert answer(page).startswith("The home team won")
    expect(page.locator(".bars li")).to_have_count(4)
    with running(store=tmp_path / "store") as (_, url):
        open_panel(page, url, "rewrite")
        page.get_by_label("Text", exact=True).fill("Ein Hund rennt.")
        page.get_by_label("New texts").fill("3")
        assert "dog" in answer(page)
        expect(page.locator(".hypotheses li")).to_have_count(3)


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_a_command_is_copied_with_and_without_a_clipboard(browser: Browser, address: str, has_clipboard: bool) -> None:
    """A page over plain HTTP has none, unless it is of this machine."""
    context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
    try:
        page = context.new_page()
        if not has_clipboard:
            page.add_init_script("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        open_panel(page, address, "classify")
        answer(page)
        page.get_by_text("The call of this panel").click()
        copy = page.get_by_role("button", name="Copy")
        copy.click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        command = page.locator(".commands code").inner_text()
        page.locator("main textarea").first.fill("")
        page.locator("main textarea").first.press("Control+v")
        assert page.locator("main textarea").first.input_value() == command
    finally:
        context.close()


def test_nothing_is_asked_while_nobody_sees_the_page(page: Page, address: str) -> None:
    page.clock.install()
    open_panel(page, address, "server")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(10_000)
    assert {url.rpartition("/")[2] for url in asked} == {"ListModels", "metrics"}
    go_to(page, "models")
    asked.clear()
    page.clock.run_for(10_000)
    assert {url.rpartition("/")[2] for url in asked} == {"ListModels"}, "figures that are not shown are not asked for"
    go_to(page, "server")
    page.evaluate("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    asked.clear()
    page.clock.run_for(60_000)
    assert asked == []
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(0)
    assert {url.rpartition("/")[2] for url in asked} == {"ListModels", "metrics"}


def test_a_refused_call_says_why(page: Page, address: str) -> None:
    open_panel(page, address, "generate")
    page.get_by_label("Temperature").fill("1.5")
    page.get_by_text("All parameters").click()
    page.get_by_label("Constraint").select_option("regex")
    page.get_by_label("Schema, expression or texts").fill("(")
    assert "The call was refused" in answer(page)
    assert "parameters.constraint" in page.locator(".problem").inner_text()


@pytest.mark.parametrize("way", ["drop", "paste"])
def test_a_picture_is_dropped_or_pasted_anywhere(page: Page, address: str, tmp_path: Path, way: str) -> None:
    Image.new("RGB", (48, 32), (90, 140, 220)).save(tmp_path / "sky.png")
    open_panel(page, address, "images")
    page.evaluate(
        """([way, png]) => {
            const bytes = Uint8Array.from(atob(png), (letter) => letter.charCodeAt(0));
            const transfer = new DataTransfer();
            transfer.items.add(new File(["not a picture"], "notes.txt", { type: "text/plain" }));
            transfer.items.add(new File([bytes], "sky.png", { type: "image/png" }));
            const options = { bubbles: true, dataTransfer: transfer, clipboardData: transfer };
            const kind = way === "drop" ? DragEvent : ClipboardEvent;
            document.body.dispatchEvent(new kind(way, options));
        }""",
        [way, base64.b64encode((tmp_path / "sky.png").read_bytes()).decode()],
    )
    expect(page.locator(".output .bars li")).to_have_count(5, timeout=10_000)
    assert page.get_by_label("Pictures").evaluate("(input) => [...input.files].map(({ name }) => name)") == ["sky.png"]


def test_a_text_that_has_a_picture_too_is_pasted_into_a_field(page: Page, address: str) -> None:
    open_panel(page, address, "caption")
    taken = page.evaluate(
        """() => ["#main", "main form input[type=text]"].map((place) => {
            const clipboardData = new DataTransfer();
            clipboardData.setData("text/plain", "a\\tb");
            clipboardData.items.add(new File([], "cells.png", { type: "image/png" }));
            const event = new ClipboardEvent("paste", { bubbles: true, cancelable: true, clipboardData });
            return !document.querySelector(place).dispatchEvent(event);
        })"""
    )
    assert taken == [True, False]


@pytest.mark.parametrize(("width", "scheme"), [(360, "dark"), (1100, "light")])
def test_every_panel_is_accessible_and_fits(browser: Browser, address: str, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme, bypass_csp=True)
    page = context.new_page()
    for panel in PANELS:
        open_panel(page, address, panel)
        expect(page.locator("#tabs a[aria-current]")).to_be_in_viewport(ratio=0.99)
        assert page.evaluate("document.querySelector('header button').getBoundingClientRect().right") <= width - 16
        if panel in ("translate", "classify", "tag", "compare", "generate", "attention"):
            answer(page)
        if panel in ("translate", "classify", "tag", "generate"):
            look_into(page)
        assert is_accessible_and_fits(page), panel
        for other in WIDTHS:
            page.set_viewport_size({"width": other, "height": 800})
            assert page.evaluate("document.documentElement.scrollWidth") <= other, (panel, other)
        page.set_viewport_size({"width": width, "height": 800})
    context.close()


def test_clicks_and_drags_cut_out_a_part_of_a_picture(browser: Browser, tmp_path: Path) -> None:
    write_segmenter_bundle(tmp_path / "store")
    picture = Image.new("RGB", (80, 40), "grey")
    picture.paste("red", (0, 0, 40, 40))
    picture.save(tmp_path / "photo.png")
    context = browser.new_context(viewport={"width": 1100, "height": 900}, bypass_csp=True)
    page = context.new_page()
    with running(store=tmp_path / "store") as (_, url):
        open_panel(page, url, "segment")
        page.get_by_label("Picture").set_input_files(tmp_path / "photo.png")

        def place(x: float, y: float) -> tuple[float, float]:
            page.locator(".overlay").scroll_into_view_if_needed()
            shown = page.locator(".overlay").bounding_box()
            assert shown is not None
            return shown["x"] + x * shown["width"], shown["y"] + y * shown["height"]

        page.mouse.click(*place(0.25, 0.5))
        output = page.locator(".output")
        expect(output).to_contain_text("1,600 pixels")
        assert page.get_by_label("Points inside").input_value() == "20,20"
        opacity = "() => document.querySelector('canvas').getContext('2d').getImageData(5, 5, 1, 1).data[3]"
        assert page.evaluate(opacity) > 0
        assert is_accessible_and_fits(page)
        page.keyboard.down("Shift")
        page.mouse.click(*place(0.75, 0.75))
        page.keyboard.up("Shift")
        expect(page.get_by_label("Points outside")).to_have_value("60,30")
        expect(output).to_contain_text("predicted IoU 0.80")  # the mask of several parts
        assert page.get_by_label("Points inside").input_value() == "20,20"
        page.get_by_role("button", name="Start over").click()
        assert page.evaluate(opacity) == 0
        page.mouse.move(*place(0.6, 0.2))
        page.mouse.down()
        page.mouse.move(*place(0.9, 0.8))
        page.mouse.up()
        # What means one thing is answered by mask 0, whose edge lies half a cell further out in this tiny model.
        expect(output).to_contain_text("box 35, 0, 80, 40")
        assert page.get_by_label("Box").input_value() == "48,8,72,32"
        page.get_by_label("Box").fill("1,2,3")
        assert "is not 4 numbers" in answer(page)
    context.close()


def test_a_picture_gets_a_caption_whose_words_show_where_they_looked(
    page: Page, captioner_store: Path, tmp_path: Path
) -> None:
    Image.new("RGB", (60, 30), (30, 30, 200)).save(tmp_path / "wall.png")
    with running(store=captioner_store) as (_, url):
        open_panel(page, url, "models")
        expect(page.locator("main")).to_contain_text("2 languages")
        open_panel(page, url, "caption")
        page.get_by_label("Language").select_option("de")
        page.get_by_label("Picture").set_input_files(tmp_path / "wall.png")
        expect(page.locator(".output .words button")).to_have_text(["eine", "blaue", "Wand"], timeout=20_000)
        expect(page.locator(".output .hypotheses li")).to_have_count(3)
        seen = (
            "() => [...document.querySelector('.output canvas').getContext('2d').getImageData(0, 0, 4, 4).data].join()"
        )
        first = page.evaluate(seen)
        page.locator(".output .words button").last.hover()
        assert page.evaluate(seen) != first
        page.get_by_label("Begins with").fill("eine grüne")
        assert "eine grüne Wand" in answer(page)


def test_a_picture_is_seen_to_come_and_is_the_one_that_the_shown_command_draws(page: Page, maker_address: str) -> None:
    open_panel(page, maker_address, "draw")
    prompt = page.get_by_label("Prompt", exact=True)
    assert prompt.locator("option").all_inner_texts() == ["Unconditional", "red", "green", "blue"]
    prompt.select_option("red")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Steps").fill("60")
    page.evaluate(
        """() => {
            window.seen = [];
            const keep = ({ target }) => target.src?.startsWith("data:image/png") && window.seen.push(target.src);
            const observer = new MutationObserver((changes) => changes.forEach(keep));
            observer.observe(document.body, { subtree: true, attributes: true });
        }"""
    )
    assert "seed 7 · 8 x 8 pixels" in answer(page)
    assert page.evaluate("window.seen.length") > 0
    name, png = downloaded(page, "Download PNG")
    assert name == "squares-7.png"
    pixels = np.asarray(Image.open(BytesIO(png)))
    assert pixels[3:5, 3:5].mean(axis=(0, 1)).argmax() == 0, "it is red"
    [result] = answer_of_shown_command(page)["results"]
    assert base64.b64decode(result["png"]) == png
    page.get_by_label("Images").fill("3")
    answer(page)
    assert [text.split(" · ")[0] for text in page.locator(".gallery small").all_inner_texts()] == [
        "seed 7",
        "seed 8",
        "seed 9",
    ]
    assert len(answer_of_shown_command(page)["results"]) == 3


def test_the_stop_button_ends_a_picture_and_a_prompt_that_is_too_long_is_refused(
    page: Page, maker_address: str
) -> None:
    open_panel(page, maker_address, "draw")
    page.get_by_label("Steps").fill("250")
    stop_when_there_is(page, "progress[max]")
    assert re.search(r"step \d+ of 250; stopped", answer(page))
    page.get_by_label("Model").select_option("text-squares/1")
    prompt = page.get_by_label("Prompt", exact=True)
    prompt.fill("a blue square")
    page.get_by_label("Steps").fill("8")
    assert "8 x 8 pixels" in answer(page)
    prompt.fill("a blue square " * 20)
    refused = answer(page)
    assert "The call was refused" in refused
    assert "prompt: has" in refused


def test_a_picture_is_drawn_over_where_a_finger_or_a_box_has_painted(
    browser: Browser, maker_address: str, tmp_path: Path
) -> None:
    photo = np.random.default_rng(0).integers(0, 256, (40, 80, 3), np.uint8)
    Image.fromarray(photo).save(tmp_path / "photo.png")
    context = browser.new_context(viewport={"width": 360, "height": 800}, has_touch=True, bypass_csp=True)
    page = context.new_page()
    open_panel(page, maker_address, "draw")
    page.get_by_text("Edit an image").click()
    page.get_by_label("Picture").set_input_files(tmp_path / "photo.png")
    strength = page.get_by_label("Strength")
    assert strength.input_value() == "0.8"
    page.get_by_label("Brush").fill("10")  # percent of 80: a dot of 8 pixels
    picture = page.locator(".overlay")
    picture.scroll_into_view_if_needed()
    shown = picture.bounding_box()
    assert shown is not None
    page.touchscreen.tap(shown["x"] + shown["width"] / 4, shown["y"] + shown["height"] / 2)
    assert strength.input_value() == "1"
    page.get_by_label("Boxes to inpaint").fill("60,5,70,15")
    assert is_accessible_and_fits(page)
    assert "80 x 40 pixels" in answer(page)
    changed = (np.asarray(Image.open(BytesIO(downloaded(page, "Download PNG")[1]))) != photo).any(-1)
    rows, columns = np.mgrid[:40, :80] + 0.5
    dot = np.hypot(rows - 20, columns - 20)
    boxed = (abs(rows - 10) < 5) & (abs(columns - 65) < 5)
    assert changed[(dot < 3) | boxed].mean() > 0.95
    assert not changed[(dot > 5) & ~boxed].any()
    page.get_by_label("Boxes to inpaint").fill("60,5,70")
    assert "is not 4 numbers" in answer(page)
    page.get_by_role("button", name="Clear the mask").click()
    assert strength.input_value() == "0.8"
    assert "8 x 8 pixels" in answer(page)  # drawn over as a whole, at the model's size
    page.get_by_role("button", name="Without an image").click()
    expect(picture).to_be_hidden()
    context.close()


def keep_what_is_played(page: Page) -> None:
    """Keeps when each piece of sound begins, its length, and what plays it."""
    page.evaluate(
        """() => {
            window.played = [];
            const { start } = AudioBufferSourceNode.prototype;
            AudioBufferSourceNode.prototype.start = function (at) {
                window.played.push({ at, seconds: this.buffer.duration, context: this.context });
                start.call(this, at);
            };
        }"""
    )


def test_a_text_is_heard_as_it_is_spoken_and_comes_as_a_file(page: Page, maker_address: str) -> None:
    open_panel(page, maker_address, "speak")
    keep_what_is_played(page)
    voice = page.get_by_label("Voice")
    assert voice.locator("option").all_inner_texts() == ["The model chooses", "ann", "bob"]
    voice.select_option("bob")
    page.get_by_label("Text", exact=True).fill("low high low")
    page.get_by_text("All parameters").click()
    page.get_by_label("Temperature").fill("1.2")
    page.get_by_label("Seed").fill("9")
    assert re.search(r"first audio after [\d.]+ m?s, [\d.]+ m?s of audio; seed 9", answer(page))
    played = page.evaluate("() => window.played.map(({ at, seconds }) => [at, seconds])")
    for (at, seconds), (following, _) in pairwise(played):
        assert following >= at + seconds - 1e-6, "one piece begins when the other is over"
    name, file = downloaded(page, "Download WAV")
    assert name == "tones-9.wav"
    [result] = answer_of_shown_command(page)["results"]
    with wave.open(BytesIO(file)) as heard, wave.open(BytesIO(base64.b64decode(result["audio"]))) as whole:
        assert heard.getparams() == whole.getparams()
        assert heard.readframes(heard.getnframes()) == whole.readframes(whole.getnframes())
        assert sum(seconds for _, seconds in played) == pytest.approx(heard.getnframes() / heard.getframerate())
    assert page.evaluate("() => document.querySelector('audio').src").startswith("blob:")
    for width in (1100, 360):
        page.set_viewport_size({"width": width, "height": 800})
        assert is_accessible_and_fits(page)


def test_the_stop_button_silences_and_a_text_that_is_too_long_is_refused(page: Page, maker_address: str) -> None:
    open_panel(page, maker_address, "speak")
    keep_what_is_played(page)
    stop_when_there_is(page, ".output audio")  # all has come, and most is still to be heard
    assert "; stopped" in answer(page)
    assert page.evaluate("() => window.played.at(-1).context.state") == "closed"
    page.get_by_label("Text", exact=True).fill("low " * 20)
    refused = answer(page)
    assert "The call was refused" in refused
    assert "text: has" in refused


def test_what_is_recorded_or_in_a_file_is_transcribed(
    browser: Browser, transcriber_store: Path, tmp_path: Path
) -> None:
    write_wav(tmp_path / "said.wav", tones("low high", 44_100), 44_100)
    context = browser.new_context(viewport={"width": 1100, "height": 900}, bypass_csp=False)
    page = context.new_page()
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text) if "Content Security" in message.text else None)
    with running(store=transcriber_store) as (_, url):
        open_panel(page, url, "transcribe")
        assert "Record something, or choose a file first." in answer(page)
        page.get_by_label("Audio").set_input_files(tmp_path / "said.wav")
        expect(page.locator(".transcript")).to_have_text("low high")
        expect(page.locator(".output")).to_contain_text("English")
        page.get_by_role("button", name="Record").click()
        page.wait_for_timeout(700)
        page.get_by_role("button", name="Stop and transcribe").click()
        expect(page.locator(".transcript")).not_to_have_text("low high", timeout=30_000)
        expect(page.locator(".output small").first).to_have_text(
            re.compile(r"^(\d{3} ms|\d\.\d\d s) · English$"), timeout=30_000
        )
        assert page.evaluate("document.querySelector('audio').src").startswith("blob:")
    assert not refused
    context.close()


def test_a_server_that_goes_away_and_comes_back(page: Page, topics: Path) -> None:
    with running(store=topics) as (process, url):
        open_panel(page, url, "classify")
        process.kill()
        process.wait()
        assert "The server cannot be reached" in answer(page)
        expect(page.locator("#status")).to_have_text("No answer", timeout=10_000)
    with running("--http-port", url.rstrip("/").rpartition(":")[2], store=topics):
        expect(page.locator("#status")).to_have_text("1 model", timeout=20_000)
        assert "Business" in answer(page)


def test_a_server_that_wants_keys_gets_one(page: Page, topics: Path, tmp_path: Path) -> None:
    access = str(tmp_path / "access.toml")
    command = [
        sys.executable,
        "-m",
        "headway_server",
        "keys",
        "create",
        "page",
        "--scope",
        "model:*",
        "--access-file",
        access,
    ]
    key = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    with running("--access-file", access, store=topics) as (_, url):
        page.goto(url)
        expect(page.locator("#status")).to_have_text("API key needed")
        page.get_by_role("button", name="API key").click()
        page.get_by_label("Key", exact=True).fill(key)
        page.get_by_role("button", name="Use").click()
        expect(page.locator("#status")).to_have_text("1 model")
        open_panel(page, url, "classify")
        assert "Business" in answer(page)
        page.get_by_text("The call of this panel").click()
        command = page.locator(".commands code").inner_text()
        assert key not in command
        environment = os.environ | {"HEADWAY_API_KEY": key}
        run = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
        assert '"Business"' in run.stdout
        page.get_by_label("Texts", exact=True).fill("What only this key may see")
        for given, told in ((f"{key}x", "API key needed"), (key, "1 model")):
            page.get_by_role("button", name="API key").click()
            page.get_by_label("Key", exact=True).fill(given)
            page.get_by_role("button", name="Use").click()
            expect(page.locator("#status")).to_have_text(told)
        expect(page.get_by_label("Texts", exact=True)).to_have_value(re.compile("^The central bank"))
        assert "only this key" not in page.evaluate("JSON.stringify({ ...sessionStorage })")
