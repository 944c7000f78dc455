import { call, CallError } from "../api.js";
import { caller, choice, chosen, field, modelChoice, textArea, timings } from "../controls.js";
import { element, show } from "../dom.js";
import { base64 } from "../images.js";

const EXAMPLES = {
  TASK_TEXT_CLASSIFICATION: "The central bank raised interest rates because prices rose.",
  TASK_TOKEN_CLASSIFICATION: "The old sailor told another story about the sea.",
  TASK_GENERATION: "ROMEO:\nBut, soft! what light through yonder window breaks?",
  TASK_TRANSLATION: "Ein kleiner Junge springt in eine Pfütze.",
};
const METHODS = {
  TASK_TEXT_CLASSIFICATION: "InspectText",
  TASK_TOKEN_CLASSIFICATION: "InspectText",
  TASK_GENERATION: "InspectGeneration",
  TASK_TRANSLATION: "InspectTranslation",
  TASK_IMAGE_CLASSIFICATION: "InspectImage",
};
const SUMMARIES = [
  ["ATTENTION_SUMMARY_UNSPECIFIED", "Every head"],
  ["ATTENTION_SUMMARY_MEAN", "Mean of each layer's heads"],
  ["ATTENTION_SUMMARY_MAXIMUM", "Maximum of each layer's heads"],
  ["ATTENTION_SUMMARY_ROLLOUT", "Rollout through all layers"],
];

function label(map) {
  const layer = map.layer === undefined ? "all layers" : `layer ${map.layer + 1}`;
  return map.head === undefined ? layer : `${layer}, head ${map.head + 1}`;
}

/** Returns the weights of a map as rows. */
function rows(map, columns) {
  const all = [];
  for (let start = 0; start < map.weights.length; start += columns) all.push(map.weights.slice(start, start + columns));
  return all;
}

/** Draws a map, a pixel a weight, the largest weight of each row as dark as can be. */
function thumbnail(weights) {
  const canvas = element("canvas", { width: weights[0].length, height: weights.length, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(weights[0].length, weights.length);
  const [red, green, blue] = getComputedStyle(document.documentElement).getPropertyValue("--heat-rgb").split(" ").map(Number);
  weights.flat().forEach((weight, index) => {
    const most = Math.max(...weights[Math.floor(index / weights[0].length)]);
    pixels.data.set([red, green, blue, Math.round((255 * weight) / (most || 1))], index * 4);
  });
  context.putImageData(pixels, 0, 0);
  return canvas;
}

function visible(text) {
  return text.replaceAll("\n", "⏎") || "∅";
}

/** Tokens of which each, when pointed at or stepped to, shows how much it attends to each of the others. */
function attending(weights, from, to) {
  const targets = to.map((text) => element("li", {}, visible(text)));
  const reading = element("p", { class: "timings", "aria-live": "polite" }, "Point at a token, or step to it, to see what it looks at.");
  const look = (row) => {
    const most = Math.max(...weights[row]);
    targets.forEach((target, column) => {
      target.className = `heat heat${Math.round((9 * weights[row][column]) / (most || 1))}`;
      target.title = weights[row][column].toFixed(3);
    });
    const order = weights[row].map((weight, column) => [weight, column]).sort((a, b) => b[0] - a[0]).slice(0, 3);
    reading.textContent = `${visible(from[row])} looks at ${order.map(([weight, column]) => `${visible(to[column])} (${(weight * 100).toFixed(0)} %)`).join(", ")}`;
  };
  const sources = from.map((text, row) =>
    element("li", {}, element("button", { type: "button", class: "plain", onmouseenter: () => look(row), onfocus: () => look(row) }, visible(text))),
  );
  return element("div", { class: "attending" }, element("ol", { class: "words" }, ...sources), element("ol", { class: "words" }, ...targets), reading);
}

/** Patches of an image over it, as bright as the class token (or the mean patch) attends to them. */
function overlay(weights, inspection, url) {
  const { patches, patchRowCount = 1, patchColumnCount = 1 } = inspection;
  const first = patches.length - patchRowCount * patchColumnCount; // tokens of the model's own
  const sums = first ? weights[0] : weights[0].map((_, column) => weights.reduce((sum, row) => sum + row[column], 0));
  const shares = sums.slice(first);
  const most = Math.max(...shares);
  const whole = element("div", { class: "overlay" }, element("img", { src: url, alt: "The picture, with what the model looked at left bright" }));
  const canvas = element("canvas", { width: patchColumnCount, height: patchRowCount, "aria-hidden": "true" });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(patchColumnCount, patchRowCount);
  shares.forEach((share, index) => pixels.data.set([0, 0, 0, Math.round(200 * (1 - share / (most || 1)))], index * 4));
  context.putImageData(pixels, 0, 0);
  whole.append(canvas);
  return whole;
}

/** Small multiples of all maps of a kind, of which one is shown large. */
function viewer(title, attention, draw) {
  const large = element("div");
  const columns = attention.columnCount;
  const pick = (map, button) => {
    for (const other of multiples.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
    show(large, element("h4", {}, label(map)), draw(rows(map, columns)));
  };
  const multiples = element(
    "ul",
    { class: "multiples" },
    ...attention.maps.map((map) => {
      const button = element("button", { type: "button", class: "plain", "aria-pressed": "false", onclick: () => pick(map, button) }, thumbnail(rows(map, columns)), element("small", {}, label(map)));
      return element("li", {}, button);
    }),
  );
  const whole = element("section", { class: "result" }, element("h3", {}, title), multiples, large);
  pick(attention.maps[0], multiples.querySelector("button"));
  return whole;
}

function pictures(result, url) {
  const texts = (tokens) => (tokens ?? []).map((each) => each.text ?? "");
  if (result.patches) return [viewer("What the picture's parts attend to", result.attention, (weights) => overlay(weights, result, url))];
  if (result.sourceTokens) {
    const [source, target] = [texts(result.sourceTokens), texts(result.targetTokens)];
    return [
      ["The translation looks at the source", result.crossAttention, target, source],
      ["The source looks at itself", result.encoderAttention, source, source],
      ["The translation looks at itself", result.decoderAttention, target, target],
    ].filter(([, attention]) => attention?.maps).map(([title, attention, from, to]) => viewer(title, attention, (weights) => attending(weights, from, to)));
  }
  const tokens = texts(result.tokens);
  return [viewer("What the tokens attend to", result.attention, (weights) => attending(weights, tokens, tokens))];
}

export const attention = {
  id: "attention",
  title: "Attention",
  lead: "What a model looks at: every head of every layer, or what they add up to.",
  tasks: Object.keys(METHODS),
  open(place, served) {
    const model = modelChoice(served, () => fit());
    const text = textArea("", 3, { required: true });
    const input = element("input", { type: "file", accept: "image/*" });
    const summary = choice(SUMMARIES);
    const textField = field("Text", text);
    const imageField = field("Picture", input);

    function fit() {
      const { task } = chosen(model, served);
      const isImage = task === "TASK_IMAGE_CLASSIFICATION";
      textField.hidden = isImage;
      text.required = !isImage;
      imageField.hidden = !isImage;
      if (!text.value || Object.values(EXAMPLES).includes(text.value)) text.value = EXAMPLES[task] ?? "";
    }

    const form = caller({
      fields: [field("Model", model), textField, imageField, field("Heads", summary)],
      label: "Look",
      async prepare() {
        const { name, task } = chosen(model, served);
        const request = { model: name, attention: { summary: summary.value } };
        if (task !== "TASK_IMAGE_CLASSIFICATION") request.text = text.value;
        else if (input.files.length) request.image = await base64(input.files[0]);
        else throw new CallError("invalid_argument", "Choose a picture first.");
        return { service: "InspectionService", method: METHODS[task], request };
      },
      async run(prepared, signal, output) {
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        const url = input.files.length ? URL.createObjectURL(input.files[0]) : null;
        show(output, ...pictures(answer.result, url), timings(answer));
      },
    });
    fit();
    place.append(form.node);
    return form.stop;
  },
};
