// The attention viewer: the call to a model, and the answer as interactive pictures.

import { call } from "./api.js";
import { commands } from "./commands.js";
import { choice, field, problem } from "./controls.js";
import { element, show, steppable } from "./dom.js";
import { picture } from "./images.js";

/** Inspection method by capability. */
export const METHODS = {
  inspect_text: "InspectText",
  inspect_image: "InspectImage",
  inspect_generation: "InspectGeneration",
  inspect_translation: "InspectTranslation",
};
const MEAN = "ATTENTION_SUMMARY_MEAN";
const SUMMARIES = [
  [MEAN, "Mean over the heads"],
  ["ATTENTION_SUMMARY_UNSPECIFIED", "Every head"],
  ["ATTENTION_SUMMARY_MAXIMUM", "Maximum of each layer's heads"],
  ["ATTENTION_SUMMARY_ROLLOUT", "Rollout through all layers"],
]; // the first is the one that is shown first

/** Choice of the summary of the heads. */
export function summaryChoice(options) {
  return choice(SUMMARIES, options);
}

/** Returns the inspection call {service, method, request} of a model for `input`: texts, or an image in base64. */
export function inspection({ name, version, capabilities }, input, summary) {
  const method = METHODS[capabilities.find((one) => one in METHODS)];
  return { service: "InspectionService", method, request: { model: name, modelVersion: version, ...input, attention: { summary } } };
}

/** A button below an answer that opens the viewer; null for a model without attention. */
export function looked(model, input, { url } = {}) {
  if (!model.capabilities.some((one) => one in METHODS)) return null;
  const place = element("div", { class: "attention-view", hidden: true });
  const heads = summaryChoice({ onchange: () => look() });
  const choosing = field("Heads", heads);
  let latest = null;

  async function look() {
    const prepared = inspection(model, input, heads.value);
    latest = prepared;
    place.setAttribute("aria-busy", "true");
    const found = await call(prepared.service, prepared.method, prepared.request).then(
      (answer) => [choosing, ...pictures(answer.result, heads.value, url), commands(prepared, "The call for attention")],
      (error) => [choosing, problem(error)],
    );
    if (latest !== prepared) return; // another choice was made meanwhile
    place.removeAttribute("aria-busy");
    const hadFocus = document.activeElement === heads;
    show(place, ...found);
    if (hadFocus) heads.focus();
  }

  const button = element(
    "button",
    {
      type: "button",
      "aria-expanded": "false",
      onclick: () => {
        place.hidden = !place.hidden;
        button.setAttribute("aria-expanded", String(!place.hidden));
        if (!place.hidden && !latest) look();
      },
    },
    "Attention",
  );
  return element("div", { class: "attention-button" }, button, place);
}

function label(map) {
  const layer = map.layer === undefined ? "all layers" : `layer ${map.layer}`; // from 0, as in the API
  return map.head === undefined ? layer : `${layer}, head ${map.head}`;
}

/** Returns the maps of an attention; means of layers come after their own mean. */
function mapsOf({ maps }, summary) {
  const means = maps.filter((map) => map.head === undefined && map.layer !== undefined);
  if (summary !== MEAN || means.length < 2) return maps;
  const whole = means[0].weights.map((_, place) => means.reduce((sum, { weights }) => sum + weights[place], 0) / means.length);
  return [{ weights: whole }, ...maps];
}

/** Returns the weights of a map as rows. */
function rows(map, columns) {
  const all = [];
  for (let start = 0; start < map.weights.length; start += columns) all.push(map.weights.slice(start, start + columns));
  return all;
}

/** Draws a map, one pixel per weight, with the largest weight of each row darkest. */
function thumbnail(weights) {
  const [red, green, blue] = getComputedStyle(document.documentElement).getPropertyValue("--heat-rgb").split(" ").map(Number);
  return painted(
    weights[0].length,
    weights.flatMap((row) => {
      const most = Math.max(...row) || 1;
      return row.map((weight) => [red, green, blue, Math.round((255 * weight) / most)]);
    }),
  );
}

/** A canvas of this many pixels per row. */
function painted(width, colours) {
  const height = colours.length / width;
  const canvas = element("canvas", { width, height, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  pixels.data.set(colours.flat());
  context.putImageData(pixels, 0, 0);
  return canvas;
}

function visible(text) {
  return text.trim() || text.replaceAll("\n", "⏎").replaceAll(" ", "␣") || "∅";
}

/** Adds up the rows of a map. */
function together(weights) {
  return weights[0].map((_, column) => weights.reduce((sum, row) => sum + row[column], 0) / weights.length);
}

/** Tokens that show on hover or focus their attention to the others, or to those of another text. */
function attending(weights, from, to) {
  const reading = element("p", { class: "timings", "aria-live": "polite" });
  const colour = (row, whose) => {
    const most = Math.max(...row) || 1;
    row.forEach((weight, column) => {
      targets[column].className = `word heat heat${Math.round((9 * weight) / most)}`;
      targets[column].title = weight.toFixed(3);
    });
    const order = row.map((weight, column) => [weight, column]).sort((a, b) => b[0] - a[0]).slice(0, 3);
    reading.textContent = `${whose} ${order.map(([weight, column]) => `${visible(to[column])} (${(weight * 100).toFixed(0)} %)`).join(", ")}`;
  };
  const look = (row) => {
    colour(weights[row], `${visible(from[row])} attends to`);
    sources.forEach((source, index) => source.setAttribute("aria-pressed", String(index === row)));
  };
  const sources = from.map((text, row) =>
    element(
      "button",
      { type: "button", class: "word", tabindex: row ? "-1" : "0", onmouseenter: () => look(row), onfocus: () => look(row), onclick: () => look(row) },
      visible(text),
    ),
  );
  const targets = from === to ? sources : to.map((text) => element("span", { class: "word" }, visible(text)));
  colour(together(weights), "Together they attend to");
  return element(
    "div",
    { class: "attention-tokens" },
    steppable(element("div", { class: "words", role: "group", "aria-label": "Attending tokens" }, ...sources)),
    from === to ? null : element("div", { class: "words" }, element("small", {}, "to"), ...targets),
    reading,
    element("p", { class: "timings" }, "Point at a token, or step to it with the arrow keys, to see its attention."),
  );
}

/** Patches over an image, with the attention of the class token (or the mean patch) as brightness. */
function overlay(weights, { patches, patchRowCount = 1, patchColumnCount = 1 }, url, alt) {
  const first = patches.length - patchRowCount * patchColumnCount; // tokens of the model's own
  const shares = (first ? weights[0] : together(weights)).slice(first);
  const most = Math.max(...shares) || 1;
  const veil = shares.map((share) => [0, 0, 0, Math.round(190 * (1 - Math.sqrt(share / most)))]);
  return element("div", { class: "overlay" }, picture({ src: url, alt }), painted(patchColumnCount, veil));
}

/** Small multiples of all maps, a row of heads for each layer; one is shown large. */
function viewer(title, attention, summary, draw, preview = thumbnail) {
  const large = element("div", { class: "attention-map" });
  const buttons = [];
  const layers = new Map();
  for (const map of mapsOf(attention, summary)) {
    const weights = rows(map, attention.columnCount);
    const button = element(
      "button",
      { type: "button", "aria-pressed": "false", "aria-label": label(map), onclick: () => pick() },
      preview(weights),
      element("small", {}, map.head === undefined ? label(map) : `head ${map.head}`),
    );
    const pick = () => {
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      show(large, element("h4", {}, label(map)), draw(weights));
    };
    buttons.push(button);
    if (buttons.length === 1) pick();
    const row = map.head === undefined ? "" : `layer ${map.layer}`;
    layers.set(row, [...(layers.get(row) ?? []), button]);
  }
  const multiples = [...layers].map(([name, some]) => element("div", { class: "multiples" }, name ? element("small", {}, name) : null, ...some));
  return element("section", { class: "result" }, element("h3", {}, title), ...multiples, large);
}

/** Draws an inspection by a summary; `url` is the image, if it has one. */
export function pictures(result, summary, url) {
  const texts = (tokens) => (tokens ?? []).map((each) => each.text ?? "");
  if (result.patches) return [
      viewer(
        "Attention over the image",
        result.attention,
        summary,
        (weights) => overlay(weights, result, url, "The image, brighter where attention is high"),
        (weights) => overlay(weights, result, url, ""),
      ),
    ];
  if (result.sourceTokens) {
    const [source, target] = [texts(result.sourceTokens), texts(result.targetTokens)];
    return [
      ["Attention of the translation to the source", result.crossAttention, target, source],
      ["Attention within the source", result.encoderAttention, source, source],
      ["Attention within the translation", result.decoderAttention, target, target],
    ].filter(([, attention]) => attention?.maps).map(([title, attention, from, to]) => viewer(title, attention, summary, (weights) => attending(weights, from, to)));
  }
  const tokens = texts(result.tokens);
  return [viewer("Attention of the tokens", result.attention, summary, (weights) => attending(weights, tokens, tokens))];
}

