import { call, CallError } from "../api.js";
import { addressed, caller, chosen, field, modelChoice, modelField, textArea, timings } from "../controls.js";
import { characters, element, refill, show } from "../dom.js";
import { looked } from "../viewer.js";

const EXAMPLE = "The old sailor quickly told his grandchildren another story about the sea.";
const PAGE = `{
  "words": ["Total", "due:", "12.50"],
  "boxes": [100, 80, 160, 95, 165, 80, 200, 95, 420, 80, 470, 95],
  "width": 612,
  "height": 792
}`;
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
      element("mark", { class: `tag-colour-${number}`, title: `${label}, ${share}` }, all.slice(start, end).join(""), element("small", {}, label)),
    );
    at = end;
  }
  return element("p", { class: "tagged" }, ...parts, all.slice(at).join(""));
}

function readsPages(model) {
  return model.capabilities.includes("classify_pages");
}

function page(json) {
  let read;
  try {
    read = JSON.parse(json);
  } catch (error) {
    throw new CallError("invalid_argument", `The page is no JSON: ${error.message}`);
  }
  if (!Array.isArray(read?.words)) throw new CallError("invalid_argument", "The page has no list of words");
  return read;
}

export const tag = {
  id: "tag",
  title: "Tag words",
  tab: "Tag",
  lead: "Labels the words or names of a text, or of a page by the boxes of its words.",
  capabilities: ["classify_tokens", "classify_pages"],
  open(place, served) {
    const text = textArea("", 6, { required: true });
    const example = () => (readsPages(chosen(model, served)) ? PAGE : EXAMPLE);
    const model = modelChoice(served, () => {
      if (text.value === EXAMPLE || text.value === PAGE) text.value = example();
    });
    text.value = example();
    const form = caller({
      fields: [modelField(model), field("Text", text, "A model that reads boxes takes a page: its words and their boxes, as JSON")],
      label: "Tag",
      example: () => refill(text, example()),
      prepare: () => {
        const given = readsPages(chosen(model, served)) ? { pages: [page(text.value)] } : { texts: [text.value] };
        return { service: "TextClassificationService", method: "ClassifyTokens", request: { ...addressed(model, served), ...given } };
      },
      async run(prepared, signal, output) {
        const model_ = chosen(model, served);
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        const { texts, pages } = prepared.request;
        const read = texts ? texts[0] : pages[0].words.join(" ");
        const viewer = texts ? looked(model_, { text: read }) : null;
        show(output, spans(read, answer.results[0].spans ?? [], model_.labels ?? []), viewer, timings(answer));
      },
    });
    place.append(form.node);
    return { leave: form.stop, close: form.stop };
  },
};
