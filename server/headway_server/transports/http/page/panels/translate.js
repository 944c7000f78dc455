import { call } from "../api.js";
import { addressed, caller, check, choice, chosen, field, language, modelChoice, modelField, number, textArea, timings } from "../controls.js";
import { characters, drawn, element, refill, show } from "../dom.js";
import { looked } from "../viewer.js";

const EXAMPLES = { de: "Ein kleiner Junge springt in eine Pfütze.", en: "Two dogs are running along the beach." };
const FAINTEST = 0.15; // attention that is not drawn

/** Fills a choice of languages by name, and selects the first of `wanted` that is available and not `avoided`. */
function offer(select, codes, wanted, avoided = "") {
  const named = codes.map((code) => [code, language(code)]).sort((one, other) => one[1].localeCompare(other[1]));
  show(select, ...named.map(([code, name]) => element("option", { value: code }, name)));
  const others = codes.filter((code) => code !== avoided);
  const known = wanted.map((start) => others.find((code) => code === start || code.startsWith(`${start}-`)));
  select.value = known.find(Boolean) ?? others[0] ?? codes[0];
  select.disabled = codes.length < 2;
}

function phrases(input) {
  return input.value.split(",").map((phrase) => phrase.trim()).filter(Boolean);
}

function words(text, spans) {
  const all = characters(text);
  return spans.map(({ start = 0, end = 0 }) => all.slice(start, end).join("") || "end");
}

/** Draws the attention of each translation token to the source tokens: two rows of words with lines between them. */
function lines(source, target, weights) {
  const top = element("ol", { class: "words" }, ...source.map((word) => element("li", {}, word)));
  const bottom = element("ol", { class: "words" }, ...target.map((word) => element("li", {}, word)));
  const canvas = drawn("svg", { class: "lines", "aria-hidden": "true" });
  const whole = element("div", { class: "alignment" }, top, canvas, bottom);
  const draw = () => {
    const box = canvas.getBoundingClientRect();
    if (!box.width) return;
    canvas.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    const middle = (item) => {
      const place = item.getBoundingClientRect();
      return place.left + place.width / 2 - box.left;
    };
    const strokes = [];
    weights.forEach((row, index) =>
      row.forEach((weight, at) => {
        if (weight < FAINTEST) return;
        const [from, to] = [middle(top.children[at]), middle(bottom.children[index])];
        const path = `M ${from} 0 C ${from} ${box.height / 2} ${to} ${box.height / 2} ${to} ${box.height}`;
        strokes.push(drawn("path", { d: path, "stroke-opacity": weight.toFixed(2), "stroke-width": (1 + 2 * weight).toFixed(1) }));
      }),
    );
    show(canvas, ...strokes);
  };
  new ResizeObserver(draw).observe(whole);
  return element("div", { class: "scroll", tabindex: "0", "aria-label": "Alignment as lines" }, whole);
}

function matrix(source, target, weights) {
  return element(
    "div",
    { class: "scroll", tabindex: "0" },
    element(
      "table",
      { class: "matrix" },
      element("caption", {}, "How much each word of the translation looked at each word of the source"),
      element("thead", {}, element("tr", {}, element("td"), ...source.map((word) => element("th", { scope: "col" }, word)))),
      element(
        "tbody",
        {},
        ...target.map((word, row) =>
          element(
            "tr",
            {},
            element("th", { scope: "row" }, word),
            ...weights[row].map((weight) => element("td", { class: `heat heat${Math.round(weight * 9)}` }, weight.toFixed(2))),
          ),
        ),
      ),
    ),
  );
}

function aligned(text, translation, alignment) {
  const source = words(text, alignment.sourceTokens ?? []);
  const tokens = alignment.targetTokens ?? [];
  const target = words(translation, tokens.map((token) => token.span ?? {}));
  const weights = tokens.map((token) => token.sourceAttention ?? []);
  return [lines(source, target, weights), element("details", {}, element("summary", {}, "As a matrix"), matrix(source, target, weights))];
}

export const translate = {
  id: "translate",
  title: "Translate",
  lead: "A text in another language, with alternatives and attention.",
  capabilities: ["translate_text"],
  open(place, served) {
    const isExample = (value) => Object.values(EXAMPLES).includes(value);
    const unaligned = new Set(); // models that do not tell where they looked
    const from = choice([], { onchange: () => read() });
    const to = choice([]);
    const text = textArea("", 4, { required: true });
    const read = () => {
      text.lang = from.value;
      if (!text.value || isExample(text.value)) text.value = EXAMPLES[from.value.slice(0, 2)] ?? "";
    };
    const choose = () => {
      const { sourceLanguages = [], targetLanguages = [] } = chosen(model, served);
      offer(from, sourceLanguages, [from.value, "en", "eng"]);
      offer(to, targetLanguages, [to.value, navigator.language.slice(0, 2), "de", "deu"], from.value);
      read();
    };
    const model = modelChoice(served, choose);
    choose();
    const beams = number({ min: 1, max: 8, step: 1, value: 4 });
    const hypotheses = number({ min: 1, max: 8, step: 1, value: 3 });
    const required = element("input", { type: "text", autocomplete: "off" });
    const forbidden = element("input", { type: "text", autocomplete: "off" });
    const split = check("Translate sentence by sentence, for long texts", false);
    const form = caller({
      fields: [
        modelField(model),
        element("div", { class: "grid" }, field("From", from), field("To", to)),
        field("Text", text),
        element("div", { class: "grid" }, field("Beams", beams, "1 is greedy"), field("Translations", hypotheses, "The best n")),
        element(
          "details",
          {},
          element("summary", {}, "Glossary and long texts"),
          field("Must have", required, "Phrases, with commas between"),
          field("Must not have", forbidden, "Phrases, with commas between"),
          split,
        ),
      ],
      label: "Translate",
      example: () => refill(text, EXAMPLES[from.value.slice(0, 2)] ?? EXAMPLES.en),
      prepare() {
        const model_ = chosen(model, served);
        const bySentences = split.box.checked;
        const request = {
          ...addressed(model, served),
          texts: [text.value],
          parameters: { beamSize: beams.given(), hypothesisCount: bySentences ? 1 : hypotheses.given() },
          includeAlignment: !bySentences && !unaligned.has(model_),
          splitSentences: bySentences,
        };
        if (!from.disabled) request.sourceLanguage = from.value;
        if (!to.disabled) request.targetLanguage = to.value;
        if (phrases(required).length || phrases(forbidden).length) {
          request.phraseConstraints = [{ required: phrases(required), forbidden: phrases(forbidden) }];
        }
        return { service: "TranslationService", method: "TranslateText", request };
      },
      async run(prepared, signal, output) {
        const target = to.value;
        const model_ = chosen(model, served);
        const isOfTwo = from.disabled && to.disabled; // languages: one of many has tokens of them, which nobody looks at
        let request = prepared.request;
        const ask = () => call(prepared.service, prepared.method, request, { signal });
        const answer = await ask().catch((error) => {
          if (error.code !== "failed_precondition" || !request.includeAlignment) throw error;
          unaligned.add(model_);
          request = { ...request, includeAlignment: false };
          return ask();
        });
        const [result] = answer.results;
        const all = result.hypotheses?.length ? result.hypotheses : [result];
        const place_ = element("div", { class: "result" });
        const pick = (hypothesis) => {
          const alignment = hypothesis.alignment ?? (hypothesis === all[0] ? result.alignments?.[0] : null);
          const [source] = prepared.request.texts;
          const drawing = alignment ? aligned(source, hypothesis.text, alignment) : [];
          show(place_, drawing, isOfTwo && looked(model_, { text: source, translation: hypothesis.text }));
        };
        const list = element(
          "ol",
          { class: "hypotheses" },
          ...all.map((hypothesis, index) =>
            element(
              "li",
              {},
              element("button", { type: "button", class: "link", onclick: () => pick(hypothesis), lang: target }, hypothesis.text),
              " ",
              element("small", {}, `score ${(hypothesis.score ?? 0).toFixed(2)}${index === 0 ? ", best" : ""}`),
            ),
          ),
        );
        show(output, list, place_, timings(answer));
        pick(all[0]);
        if (request !== prepared.request) return { ...prepared, request };
      },
    });
    place.append(form.node);
    return { leave: form.stop, close: form.stop };
  },
};
