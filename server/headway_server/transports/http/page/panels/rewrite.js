import { call } from "../api.js";
import { addressed, caller, field, modelChoice, modelField, number, textArea, timings } from "../controls.js";
import { element, refill, show } from "../dom.js";

const EXAMPLE = "summarize: The lighthouse was built in 1851. A storm broke its lamp in the winter of 1862, and the keeper lit a fire on the roof until spring.";

export const rewrite = {
  id: "rewrite",
  title: "Rewrite a text",
  tab: "Rewrite",
  lead: "A new text made of a text: a summary, a correction, an answer to an instruction.",
  capabilities: ["rewrite_text"],
  open(place, served) {
    const model = modelChoice(served);
    const text = textArea(EXAMPLE, 6, { required: true });
    const prefix = element("input", { type: "text", autocomplete: "off" });
    const beams = number({ min: 1, max: 8, step: 1, value: 4 });
    const hypotheses = number({ min: 1, max: 8, step: 1, value: 1 });
    const longest = number({ min: 1, step: 1 });
    const form = caller({
      fields: [
        modelField(model),
        field("Text", text, "As the model takes it, instruction included. Ctrl+Enter sends."),
        field("Begins with", prefix, "Optional"),
        element("div", { class: "grid" }, field("Beams", beams, "1 is greedy"), field("New texts", hypotheses, "The best n"), field("Length limit", longest, "Tokens")),
      ],
      label: "Rewrite",
      example: () => refill(text, EXAMPLE),
      prepare: () => ({
        service: "TextToTextService",
        method: "RewriteText",
        request: {
          ...addressed(model, served),
          texts: [text.value],
          parameters: { beamSize: beams.given(), hypothesisCount: hypotheses.given(), maxNewTokens: longest.given() },
          targetPrefixes: prefix.value.trim() ? [prefix.value] : undefined,
        },
      }),
      async run(prepared, signal, output) {
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        const [result] = answer.results;
        const all = result.hypotheses?.length ? result.hypotheses : [result];
        const item = ({ text: written = "", score = 0 }) => element("li", {}, written, " ", element("small", {}, `score ${score.toFixed(2)}`));
        show(output, element("ol", { class: "hypotheses" }, ...all.map(item)), timings(answer));
      },
    });
    place.append(form.node);
    return { leave: form.stop, close: form.stop };
  },
};
