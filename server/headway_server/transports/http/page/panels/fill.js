import { call } from "../api.js";
import { addressed, bars, caller, field, modelChoice, modelField, textArea, timings } from "../controls.js";
import { element, refill, show } from "../dom.js";

const EXAMPLE = "The old sailor told a [MASK] about the [MASK].";

export const fill = {
  id: "fill",
  title: "Fill masks",
  tab: "Fill",
  lead: "Finds the likeliest tokens for each [MASK] of a text.",
  capabilities: ["fill_mask"],
  open(place, served) {
    const model = modelChoice(served);
    const text = textArea(EXAMPLE, 4, { required: true });
    const targets = element("input", { type: "text" });
    const form = caller({
      fields: [modelField(model), field("Text", text), field("Targets", targets, "Tokens to choose from, with commas between; empty: all. A space before a token counts, as the model has it")],
      label: "Fill",
      example: () => refill(text, EXAMPLE),
      prepare: () => ({
        service: "MaskFillingService",
        method: "FillMask",
        request: {
          ...addressed(model, served),
          texts: [text.value],
          targets: targets.value.split(",").filter((one) => one.trim()),
        },
      }),
      async run(prepared, signal, output) {
        const found = await call(prepared.service, prepared.method, prepared.request, { signal });
        const [{ masks = [] }] = found.results;
        show(
          output,
          ...masks.map(({ tokens = [] }) =>
            element(
              "section",
              { class: "result" },
              element("h3", { class: "quote" }, tokens[0]?.filledText ?? ""),
              bars(tokens.map(({ token, probability = 0 }) => [token.trim(), probability, false])),
            ),
          ),
          timings(found),
        );
      },
    });
    place.append(form.node);
    return { leave: form.stop, close: form.stop };
  },
};
