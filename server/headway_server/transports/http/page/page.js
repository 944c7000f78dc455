// The page: the open panel, the models, the state of the server.

import { call, key } from "./api.js";
import { problem } from "./controls.js";
import { element, repeat, show } from "./dom.js";
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
import { segment } from "./panels/segment.js";
import { server } from "./panels/server.js";
import { sounds } from "./panels/sounds.js";
import { speak } from "./panels/speak.js";
import { tag } from "./panels/tag.js";
import { transcribe } from "./panels/transcribe.js";
import { translate } from "./panels/translate.js";
import { videos } from "./panels/videos.js";

const PANELS = [models, generate, translate, classify, tag, answer, fill, compare, images, detect, maps, caption, draw, transcribe, sounds, videos, speak, segment, attention, server];
const LOOK_EVERY_MS = 3000;

const main = document.getElementById("main");
const tabs = document.getElementById("tabs");
const status = document.getElementById("status");
const open = { panel: null, leave: null };
const kept = new Map(); // what was opened and has a form, by the panel: {place, models, leave, close}
let served = null; // the models; null until the server has answered

/** The panel's fragment in the page's address: a route, not an anchor within the page. */
function route(panel) {
  return `#/${panel.id}`;
}

function panelOf(hash) {
  return PANELS.find((panel) => route(panel) === hash) ?? PANELS[0];
}

/**
 * Makes a panel, or returns the existing one for these models, with its inputs and answers.
 *
 * `panel.open` returns `leave`, which ends running calls, and `close`, which also frees the panel's state.
 */
function made(panel) {
  const wanted = panel.capabilities ?? [];
  const fitting = wanted.length ? served.filter((model) => model.capabilities.some((one) => wanted.includes(one))) : served;
  const before = kept.get(panel);
  if (before?.models === names(fitting)) return before;
  before?.close?.();
  kept.delete(panel);
  const place = element("article", { class: `panel ${panel.id}`, "aria-labelledby": "panel-title" });
  place.append(element("h2", { id: "panel-title" }, panel.title), element("p", { class: "lead" }, panel.lead));
  if (wanted.length && !fitting.length) {
    place.append(element("p", { class: "empty" }, "This server has no model for that. Put a bundle into its store."));
    return { place };
  }
  const one = { place, models: names(fitting), ...panel.open(place, fitting) };
  if (wanted.length) kept.set(panel, one);
  return one;
}

function openPanel(panel) {
  open.leave?.();
  const { place, leave } = made(panel);
  open.leave = leave;
  open.panel = panel;
  show(main, place);
  document.title = `${panel.title} · headway`;
  for (const link of tabs.children) {
    if (link.hash === route(panel)) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  revealTab();
}

/** Scrolls a row of tabs wider than the screen until the open panel's tab and part of its neighbour are visible. */
function revealTab() {
  const link = tabs.querySelector("[aria-current]");
  if (!link) return;
  const [row, tab] = [tabs.getBoundingClientRect(), link.getBoundingClientRect()];
  const margin = Math.max(0, Math.min(48, (row.width - tab.width) / 2));
  if (tab.left - margin < row.left) tabs.scrollLeft += tab.left - margin - row.left;
  else if (tab.right + margin > row.right) tabs.scrollLeft += tab.right + margin - row.right;
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
    const answer = await call("ModelService", "ListModels", {});
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
      if (dialog.returnValue !== "save") return;
      key.set(value.value.trim());
      served = null;
      look();
    },
    { once: true },
  );
  dialog.showModal();
}

for (const panel of PANELS) tabs.append(element("a", { href: route(panel) }, panel.tab ?? panel.title));
document.getElementById("key").addEventListener("click", askForKey);
addEventListener("hashchange", () => {
  if (!served || !PANELS.some((panel) => route(panel) === location.hash)) return;
  openPanel(panelOf(location.hash));
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
});
addEventListener("resize", revealTab);
repeat(look, LOOK_EVERY_MS);
