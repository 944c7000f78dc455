import { call } from "../api.js";
import { caller, chosen, field, modelChoice, textArea, timings } from "../controls.js";
import { characters, element, show } from "../dom.js";
import { looked } from "../viewer.js";

const EXAMPLE = "The old sailor quickly told his grandchildren another story about the sea.";
const NUM_COLOURS = 12;

function spans(text, found, labels) {
  const all = characters(text);
  const parts = [];
  let at = 0;
  for (const { label, span: { start = 0, end }, probability = 0 } of found) {
    parts.push(all.slice(at, start).join(""));
    const number = labels.indexOf(label) % NUM_COLOURS;
    const share = `${(probability * 100).toFixed(1)} %`;
    parts.push(
      element("mark", { class: `kind${number}`, title: `${label}, ${share}` }, all.slice(start, end).join(""), element("small", {}, label)),
    );
    at = end;
  }
  return element("p", { class: "tagged" }, ...parts, all.slice(at).join(""));
}

export const tag = {
  id: "tag",
  title: "Tag words",
  tab: "Tag",
  lead: "Labels the words or names of a text.",
  capabilities: ["classify_tokens"],
  open(place, served) {
    const model = modelChoice(served);
    const text = textArea(EXAMPLE, 4, { required: true });
    const form = caller({
      fields: [field("Model", model), field("Text", text)],
      label: "Tag",
      prepare: () => ({
        service: "TextClassificationService",
        method: "ClassifyTokens",
        request: { model: chosen(model, served).name, texts: [text.value] },
      }),
      async run(prepared, signal, output) {
        const model_ = chosen(model, served);
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        const [read] = prepared.request.texts;
        show(output, spans(read, answer.results[0].spans ?? [], model_.labels ?? []), looked(model_, { text: read }), timings(answer));
      },
    });
    place.append(form.node);
    return { leave: form.stop, close: form.stop };
  },
};
