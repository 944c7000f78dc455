import { call } from "../api.js";
import { addressed, caller, chosen, field, modelChoice, modelField, textArea, timings } from "../controls.js";
import { element, refill, show } from "../dom.js";
import { looked } from "../viewer.js";

const EXAMPLE =
  "The striker scored twice in the final\nThe goalkeeper saved a penalty\nShares fell after the bank's report\nMarkets dropped on weak earnings";

function similarity(a, b) {
  return a.reduce((sum, value, index) => sum + value * b[index], 0);
}

function matrix(texts, vectors) {
  const heads = texts.map((_, index) => element("th", { scope: "col" }, String(index + 1)));
  const rows = texts.map((text, row) =>
    element(
      "tr",
      {},
      element("th", { scope: "row" }, `${row + 1}. ${text}`),
      ...vectors.map((vector) => {
        const value = similarity(vectors[row], vector);
        return element("td", { class: `heat heat${Math.round(Math.max(0, Math.min(1, value)) * 9)}` }, value.toFixed(2));
      }),
    ),
  );
  return element(
    "div",
    { class: "scroll", tabindex: "0" },
    element(
      "table",
      { class: "matrix" },
      element("caption", {}, "Cosine similarity of the texts' vectors"),
      element("thead", {}, element("tr", {}, element("td"), ...heads)),
      element("tbody", {}, ...rows),
    ),
  );
}

export const compare = {
  id: "compare",
  title: "Compare texts",
  tab: "Compare",
  lead: "Similarity of texts in a model's embedding space.",
  capabilities: ["embed_text"],
  open(place, served) {
    const model = modelChoice(served);
    const texts = textArea(EXAMPLE, 6, { required: true });
    const form = caller({
      fields: [modelField(model), field("Texts", texts, "One per line, at most 24.")],
      label: "Compare",
      example: () => refill(texts, EXAMPLE),
      prepare: () => ({
        service: "EmbeddingService",
        method: "EmbedText",
        request: {
          ...addressed(model, served),
          texts: texts.value.split("\n").filter((line) => line.trim()).slice(0, 24),
          normalize: true,
        },
      }),
      async run(prepared, signal, output) {
        const model_ = chosen(model, served);
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        const { texts: asked } = prepared.request;
        show(
          output,
          matrix(asked, answer.results.map((result) => result.values)),
          ...asked.map((text) => element("section", { class: "result" }, element("h3", { class: "quote" }, text), looked(model_, { text }))),
          timings(answer),
        );
      },
    });
    place.append(form.node);
    return { leave: form.stop, close: form.stop };
  },
};
