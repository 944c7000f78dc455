// Controls of a panel: labelled fields, the submit button, and the result of the call.

import { CallError } from "./api.js";
import { commands } from "./commands.js";
import { element, newId, show, written } from "./dom.js";
import { give } from "./images.js";

/** Name of a control by its label; what was entered is kept by it. */
function named(label) {
  return label.toLowerCase().replaceAll(/\W+/g, "-");
}

/** A field with its label, and a hint below. */
export function field(label, control, hint) {
  const id = newId("field");
  control.id = id;
  control.name = named(label);
  if (!hint) return element("div", { class: "field" }, element("label", { for: id }, label), control);
  const hintId = newId("hint");
  control.setAttribute("aria-describedby", hintId);
  return element(
    "div",
    { class: "field" },
    element("label", { for: id }, label),
    control,
    element("small", { id: hintId }, hint),
  );
}

export function textArea(value, rows, attributes = {}) {
  const area = element("textarea", { rows, ...attributes });
  area.value = value;
  return area;
}

/** A number; `value()` is undefined if empty, so the model's default applies. */
export function number(attributes) {
  const input = element("input", { type: "number", inputmode: "decimal", ...attributes });
  input.given = () => (input.value === "" ? undefined : Number(input.value));
  return input;
}

/** A slider, with its value beside the label. */
export function slider(label, attributes) {
  const input = element("input", { type: "range", oninput: () => input.set(input.value), ...attributes });
  const shown = element("output", { "aria-hidden": "true" });
  input.set = (value) => {
    input.value = value;
    shown.textContent = ` ${input.value}`;
  };
  input.set(input.value);
  const whole = field(label, input);
  whole.querySelector("label").append(shown);
  whole.input = input;
  return whole;
}

/** Shows the default of a number. */
export function expect(input, value) {
  input.placeholder = String(Number(Number(value).toFixed(3)));
}

/** Sampling fields, as in the API's SamplingParameters. */
export function sampling() {
  const temperature = number({ min: 0, max: 2, step: 0.05 });
  const topK = number({ min: 0, step: 1 });
  const topP = number({ min: 0.01, max: 1, step: 0.01 });
  const minP = number({ min: 0, max: 1, step: 0.01 });
  const seed = number({ min: 0, step: 1 });
  return {
    temperature: field("Temperature", temperature, "0: greedy"),
    others: [field("Top-k", topK, "0: all"), field("Top-p", topP), field("Min-p", minP)],
    seed: field("Seed", seed, "Empty: random"),
    /** Shows a model's defaults. */
    expect(own = {}) {
      for (const [input, value] of [[temperature, own.temperature ?? 0], [topK, own.topK ?? 0], [topP, own.topP ?? 1], [minP, own.minP ?? 0]]) expect(input, value);
    },
    given: () => ({ temperature: temperature.given(), topK: topK.given(), topP: topP.given(), minP: minP.given(), seed: seed.value || undefined }),
  };
}

export function check(label, isChecked, onchange) {
  const box = element("input", { type: "checkbox", name: named(label), onchange });
  box.checked = isChecked;
  const whole = element("label", { class: "check" }, box, " ", label);
  whole.box = box;
  return whole;
}

export function choice(options, { value, onchange } = {}) {
  const select = element("select", { onchange }, ...options.map(([name, label]) => element("option", { value: name }, label)));
  if (value !== undefined) select.value = value;
  return select;
}

const LANGUAGES = new Intl.DisplayNames(["en"], { type: "language" });

/** Returns the English name of a BCP 47 code's language. */
export function language(code) {
  try {
    return LANGUAGES.of(code);
  } catch {
    return code;
  }
}

const READS_NO_TEXT = ["captioning", "transcription", "ctc_transcription"];

/** Returns a model's limits in one line; its description if it tells none. */
function limits({ description = "", maxInputTokenCount, maxTokenCount, labels, embeddingDimension, task }) {
  const kind = { image_generation: "classes", speech_synthesis: "voices" }[task] ?? "labels";
  const told = [
    maxInputTokenCount && !READS_NO_TEXT.includes(task) && `reads up to ${written(maxInputTokenCount)} tokens`,
    maxTokenCount && (task === "generation" ? `${written(maxTokenCount)} with the answer` : `writes up to ${written(maxTokenCount)} tokens`),
    labels?.length && `${written(labels.length)} ${kind}`,
    embeddingDimension && !labels?.length && `vectors of ${written(embeddingDimension)} numbers`,
  ].filter(Boolean);
  const line = told.join(" · ") || description;
  return line.charAt(0).toUpperCase() + line.slice(1);
}

/** Choice of a model; always visible, because it names the answering one. Its limits are `about`. */
export function modelChoice(models, onchange) {
  const about = element("span", { class: "limits" });
  const tell = () => {
    const model = chosen(select, models);
    about.textContent = limits(model);
    about.title = model.description ?? "";
  };
  const select = choice(
    models.map((model) => [`${model.name}/${model.version}`, `${model.name} (${model.version})`]),
    {
      onchange: () => {
        tell();
        onchange?.();
      },
    },
  );
  select.about = about;
  tell();
  return select;
}

/** The field of a model's choice, with the model's limits below. */
export function modelField(select) {
  return field("Model", select, select.about);
}

/** Returns the chosen model. */
export function chosen(select, models) {
  return models.find((model) => `${model.name}/${model.version}` === select.value);
}

/** Returns the fields of a request that name the chosen model. */
export function addressed(select, models) {
  const { name, version } = chosen(select, models);
  return { model: name, modelVersion: version };
}

/** Returns the page's display of an error. */
export function problem(error) {
  const isOurs = error instanceof CallError;
  return element(
    "div",
    { class: "problem", role: "alert" },
    element("strong", {}, isOurs ? heading(error.code) : "Error in this page"),
    element("p", {}, isOurs ? error.message : String(error)),
  );
}

function heading(code) {
  const headings = {
    invalid_argument: "The call was refused",
    unauthenticated: "The server requires an API key",
    permission_denied: "The key lacks this permission",
    not_found: "Not found",
    failed_precondition: "Not supported by this model",
    resource_exhausted: "The server is overloaded",
    unavailable: "The server cannot be reached",
    deadline_exceeded: "The deadline has passed",
  };
  return headings[code] ?? "The call failed";
}

const ONE_COLUMN = matchMedia("(max-width: 60rem)");
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

/** Scrolls a narrow page to an element, unless much of it is in sight. */
function bring(node) {
  const { top, bottom } = node.getBoundingClientRect();
  if (!ONE_COLUMN.matches || (top < innerHeight / 2 && bottom > innerHeight / 2)) return;
  node.scrollIntoView({ behavior: STILL.matches ? "auto" : "smooth", block: "start" });
}

/** Gives dropped or pasted files to the open panel's first visible input that takes such. */
function takeFiles(event, files) {
  const inputs = [...document.querySelectorAll("form.call input[type=file]")].filter((input) => input.checkVisibility());
  for (const input of inputs) {
    const kinds = input.accept.split(",").map((kind) => kind.replace("*", ""));
    const some = [...files].filter((file) => kinds.some((kind) => file.type.startsWith(kind)));
    if (!some.length) continue;
    event.preventDefault();
    give(input, input.multiple ? some : some.slice(0, 1));
    return;
  }
}

function hasFiles(event) {
  return event.dataTransfer.types.includes("Files");
}

addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault(); // a file that no input takes is not opened in place of the page
  takeFiles(event, event.dataTransfer.files);
});
addEventListener("paste", (event) => {
  const { files = [], types = [] } = event.clipboardData ?? {};
  const isText = types.includes("text/plain") && event.target.matches?.("textarea, input:not([type=file])");
  if (!isText) takeFiles(event, files); // a spreadsheet's cells are a text and a picture
});

/**
 * A form that makes one call at a time.
 *
 * `prepare()` returns {service, method, request}; `run(prepared, signal, output)` makes the call and fills `output`. It
 * returns the actual call, if that was another one. `stage` is the picture that is worked on, above the answer.
 * `example()` fills in an example, whose call is then made, unless it returns true because it is already.
 * The call is shown below as commands of other programs.
 */
export function caller({ fields, label, prepare, run, stage, example, isLive = false }) {
  const output = element("div", { class: "results", "aria-live": isLive ? "off" : "polite" });
  const card = element("section", { class: "output", "aria-label": "Answer" }, stage, output);
  const spoken = element("p", { class: "spoken", role: "status" }); // of a stream only its end is read out
  const shown = element("div");
  const button = element("button", { type: "submit", class: "primary" }, label);
  const stop = element("button", { type: "button", disabled: true }, "Stop");
  const empty = element(
    "div",
    { class: "blank" },
    element("p", {}, "The answer appears here."),
    example && element("button", { type: "button", onclick: showExample }, "Show an example"),
  );
  let running = null;

  async function showExample() {
    try {
      if (!(await example())) submit();
    } catch (error) {
      show(output, problem(error));
    }
  }

  async function submit(event) {
    event?.preventDefault();
    running?.abort();
    const mine = new AbortController();
    running = mine;
    stop.disabled = false;
    form.setAttribute("aria-busy", "true");
    spoken.textContent = "";
    for (const old of [empty, ...output.querySelectorAll(":scope > .problem")]) old.remove();
    bring(card);
    try {
      const prepared = await prepare();
      if (!prepared) return;
      show(shown, commands(prepared));
      const called = await run(prepared, mine.signal, output);
      if (called) show(shown, commands(called));
      if (isLive) spoken.textContent = "The answer is complete.";
    } catch (error) {
      if (error.name === "AbortError") {
        if (running === mine) spoken.textContent = "Stopped.";
      } else output.append(problem(error));
    } finally {
      if (running === mine) {
        running = null;
        stop.disabled = true;
        form.removeAttribute("aria-busy");
      }
    }
  }

  stop.addEventListener("click", () => running?.abort());
  const form = element("form", { class: "call", onsubmit: submit }, ...fields, element("div", { class: "row" }, button, stop));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  });
  const node = element("div", { class: "workspace" }, form, element("div", { class: "answers" }, card, spoken, shown));
  show(output, empty);
  return {
    node,
    submit,
    output,
    clear: () => show(output, empty),
    stop: () => running?.abort(),
  };
}

/** Horizontal bars of values from 0 to 1: [[label, value, isMarked, text]]; the text is by default the value in percent. */
export function bars(rows) {
  return element(
    "ul",
    { class: "bars" },
    ...rows.map(([label, value, isMarked, text = `${(value * 100).toFixed(1)} %`]) => {
      const bar = element("span", { class: "bar" });
      bar.style.inlineSize = `${Math.max(value * 100, 0.5)}%`;
      return element(
        "li",
        { class: isMarked ? "marked" : null },
        element("span", { class: "name" }, label),
        element("span", { class: "track", "aria-hidden": "true" }, bar),
        element("span", { class: "value" }, text),
      );
    }),
  );
}

/** Timings of a call, from the answer. */
export function timings(answer) {
  const seconds = (text) => (text ? Number.parseFloat(text) : 0);
  const { total, queue, inference } = answer.timings ?? {};
  if (!total) return null;
  const part = (name, value) => `${name} ${(seconds(value) * 1000).toFixed(1)} ms`;
  return element("p", { class: "timings" }, [part("total", total), part("queue", queue), part("model", inference)].join(" · "));
}
