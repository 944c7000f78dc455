import { call } from "../api.js";
import { addressed, bars, caller, chosen, field, modelChoice, modelField, textArea, timings } from "../controls.js";
import { element, refill, show } from "../dom.js";
import { looked } from "../viewer.js";

const EXAMPLE =
  "The central bank raised interest rates for the third time this year\nScientists find water on a distant planet\nThe home team won after extra time";

const MOST_LABELS = 8;

export const classify = {
  id: "classify",
  title: "Classify texts",
  tab: "Classify",
  lead: "One text per line; labels with probabilities for each.",
  capabilities: ["classify_text"],
  open(place, served) {
    const model = modelChoice(served);
    const texts = textArea(EXAMPLE, 5, { required: true });
    const form = caller({
      fields: [modelField(model), field("Texts", texts, "One per line. Ctrl+Enter sends.")],
      label: "Classify",
      example: () => refill(texts, EXAMPLE),
      prepare() {
        const { labels = [] } = chosen(model, served);
        const lines = texts.value.split("\n").filter((line) => line.trim());
        const request = { ...addressed(model, served), texts: lines, topK: Math.min(MOST_LABELS, labels.length) };
        return { service: "TextClassificationService", method: "ClassifyText", request };
      },
      async run(prepared, signal, output) {
        const model_ = chosen(model, served);
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        show(
          output,
          ...answer.results.map((result, index) =>
            element(
              "section",
              { class: "result" },
              element("h3", { class: "quote" }, prepared.request.texts[index]),
              bars(result.labels.map((label) => [label.label, label.probability ?? 0, label.selected])),
              looked(model_, { text: prepared.request.texts[index] }),
            ),
          ),
          timings(answer),
        );
      },
    });
    place.append(form.node);
    return { leave: form.stop, close: form.stop };
  },
};
