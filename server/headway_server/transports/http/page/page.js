// The page: the groups of panels, the open panel, the models, the state of the server.

import { call, key } from "./api.js";
import { problem } from "./controls.js";
import { element, repeat, show, steppable } from "./dom.js";
import { forget, remember } from "./memory.js";
import { answer } from "./panels/answer.js";
import { attention } from "./panels/attention.js";
import { caption } from "./panels/caption.js";
import { classify } from "./panels/classify.js";
import { compare } from "./panels/compare.js";
import { detect } from "./panels/detect.js";
import { draw } from "./panels/draw.js";
import { fill } from "./panels/fill.js";
import { generate } from "./panels/generate.js";
import { images } from "./panels/images.js";
import { maps } from "./panels/maps.js";
import { models } from "./panels/models.js";
import { rank } from "./panels/rank.js";
import { rewrite } from "./panels/rewrite.js";
import { segment } from "./panels/segment.js";
import { server } from "./panels/server.js";
import { sounds } from "./panels/sounds.js";
import { speak } from "./panels/speak.js";
import { tag } from "./panels/tag.js";
import { transcribe } from "./panels/transcribe.js";
import { translate } from "./panels/translate.js";
import { videos } from "./panels/videos.js";

const GROUPS = {
  Text: [generate, rewrite, translate, classify, tag, answer, fill, compare, rank],
  Image: [images, detect, segment, maps, caption, draw, videos],
  Speech: [transcribe, speak, sounds],
  Inspect: [attention],
  Operate: [models, server],
};
const PANELS = Object.values(GROUPS).flat();
const FIRST = models;
const LOOK_EVERY_MS = 3000;

const main = document.getElementById("main");
const groupRow = document.getElementById("groups");
const tabRow = document.getElementById("tabs");
const status = document.getElementById("status");
const open = { panel: null, leave: null };
const kept = new Map(); // what was opened and has a form, by the panel: {place, models, leave, close}
let served = null; // the models; null until the server has answered

const groups = Object.entries(GROUPS).map(([name, panels]) => ({
  panels,
  link: element("a", { href: route(panels[0]) }, name),
  tabs: panels.map((panel) => element("a", { href: route(panel) }, panel.tab ?? panel.title)),
}));

/** The panel's fragment in the page's address: a route, not an anchor within the page. */
function route(panel) {
  return `#/${panel.id}`;
}

function panelOf(hash) {
  return PANELS.find((panel) => route(panel) === hash) ?? FIRST;
}

function fits(panel, model) {
  return !panel.capabilities || model.capabilities.some((one) => panel.capabilities.includes(one));
}

/** Links to the panels that call a model. */
function linksOf(model) {
  return PANELS.filter((panel) => panel.capabilities && fits(panel, model)).map((panel) => element("a", { href: route(panel) }, panel.tab ?? panel.title));
}

/**
 * Makes a panel, or returns the existing one for these models, with its inputs and answers.
 *
 * `panel.open` returns `leave`, which ends running calls, and `close`, which also frees the panel's state.
 */
function made(panel) {
  const fitting = served.filter((model) => fits(panel, model));
  const before = kept.get(panel);
  if (before?.models === names(fitting)) return before;
  before?.close?.();
  kept.delete(panel);
  const place = element("article", { class: `panel ${panel.id}`, "aria-labelledby": "panel-title" });
  place.append(element("div", { class: "heading" }, element("h2", { id: "panel-title" }, panel.title), element("p", {}, panel.lead)));
  if (!fitting.length && panel.capabilities) {
    place.append(element("p", { class: "empty" }, "This server has no model for that. Put a bundle into its store."));
    return { place };
  }
  const one = { place, models: names(fitting), ...panel.open(place, fitting, { all: served, linksOf }) };
  const form = place.querySelector("form");
  if (form) remember(form, panel.id);
  if (panel.capabilities) kept.set(panel, one);
  return one;
}

function mark(link, kind) {
  if (kind) link.setAttribute("aria-current", kind);
  else link.removeAttribute("aria-current");
}

/** Marks the open panel and its group, whose link leads from now on to this panel. */
function showTabs(panel) {
  for (const { panels, link, tabs } of groups) {
    const isOpen = panels.includes(panel);
    mark(link, isOpen && "true");
    if (!isOpen) continue;
    link.href = route(panel);
    if (tabs[0].parentNode !== tabRow) show(tabRow, ...tabs);
    tabs.forEach((tab, index) => mark(tab, panels[index] === panel && "page"));
  }
}

function openPanel(panel) {
  open.leave?.();
  const { place, leave } = made(panel);
  open.leave = leave;
  open.panel = panel;
  show(main, place);
  document.title = `${panel.title} · headway`;
  showTabs(panel);
}

function names(models) {
  return JSON.stringify(models?.map(({ name, version }) => [name, version]));
}

function say(state, text) {
  if (status.textContent === text) return;
  status.className = state;
  status.textContent = text;
}

async function look() {
  try {
    const asking = key.get();
    const answer = await call("ModelService", "ListModels", {});
    if (asking !== key.get()) return;
    const models = answer.models ?? [];
    say("up", models.length === 1 ? "1 model" : `${models.length} models`);
    if (names(models) === names(served)) return;
    const isFirst = served === null;
    served = models;
    // A panel with a form is not changed, because somebody may be writing there; it shows new models when it is reopened.
    if (isFirst || !open.panel.capabilities) openPanel(panelOf(location.hash));
  } catch (error) {
    say("down", error.code === "unauthenticated" ? "API key needed" : "No answer");
    if (served === null) show(main, problem(error));
  }
}

function askForKey() {
  const dialog = document.getElementById("key-dialog");
  const value = document.getElementById("key-value");
  value.value = key.get();
  dialog.addEventListener(
    "close",
    () => {
      const given = value.value.trim();
      if (dialog.returnValue !== "save" || given === key.get()) return;
      key.set(given);
      for (const one of kept.values()) one.close();
      kept.clear();
      forget(); // another key may be another person's
      served = null;
      look();
    },
    { once: true },
  );
  dialog.returnValue = ""; // Escape leaves it as it is
  dialog.showModal();
}

groupRow.append(...groups.map(({ link }) => link));
for (const row of [groupRow, tabRow]) steppable(row);
showTabs(panelOf(location.hash));
document.getElementById("key").addEventListener("click", askForKey);
addEventListener("hashchange", () => {
  if (!served || !PANELS.some((panel) => route(panel) === location.hash)) return;
  const isGroupChosen = groupRow.contains(document.activeElement); // its panels come next in the tab order
  openPanel(panelOf(location.hash));
  scrollTo(0, 0);
  if (!isGroupChosen) main.focus({ preventScroll: true });
});
repeat(look, LOOK_EVERY_MS);
