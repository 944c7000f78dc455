import { call, CallError } from "../api.js";
import { caller, chosen, field, modelChoice, modelField, textArea, timings } from "../controls.js";
import { element, refill, show } from "../dom.js";
import { ship } from "../examples.js";
import { base64, give, picture } from "../images.js";
import { inspection, METHODS, pictures, summaryChoice } from "../viewer.js";

const EXAMPLES = {
  text_classification: "The central bank raised interest rates because prices rose.",
  token_classification: "The old sailor told another story about the sea.",
  generation: "ROMEO:\nBut, soft! what light through yonder window breaks?",
  translation: "Ein kleiner Junge springt in eine Pfütze.",
};

export const attention = {
  id: "attention",
  title: "Attention",
  lead: "What a model attends to: the mean over all heads, each layer, or every head.",
  capabilities: Object.keys(METHODS),
  open(place, served) {
    const model = modelChoice(served, () => fit());
    const text = textArea("", 3, { required: true });
    const input = element("input", { type: "file", accept: "image/*", onchange: (event) => take(event) });
    const summary = summaryChoice();
    const textField = field("Text", text);
    const imageField = field("Picture", input);

    function fit() {
      const { task, capabilities } = chosen(model, served);
      const isImage = capabilities.includes("inspect_image");
      textField.hidden = isImage;
      text.required = !isImage;
      imageField.hidden = !isImage;
      if (!text.value || Object.values(EXAMPLES).includes(text.value)) text.value = EXAMPLES[task] ?? EXAMPLES.text_classification;
    }

    let url = null; // of the picture

    function take({ detail }) {
      URL.revokeObjectURL(url);
      url = input.files.length ? URL.createObjectURL(input.files[0]) : null;
      if (url) show(form.output, element("div", { class: "overlay" }, picture({ src: url, alt: input.files[0].name })));
      if (url && !detail?.isKept) form.submit();
    }

    const form = caller({
      fields: [modelField(model), textField, imageField, field("Heads", summary)],
      label: "Look",
      async example() {
        if (!textField.hidden) refill(text, EXAMPLES[chosen(model, served).task] ?? EXAMPLES.text_classification);
        else give(input, [await ship()]);
        return textField.hidden;
      },
      async prepare() {
        const read = {};
        if (!textField.hidden) read.text = text.value;
        else if (input.files.length) read.image = await base64(input.files[0]);
        else throw new CallError("invalid_argument", "Choose an image first.");
        return inspection(chosen(model, served), read, summary.value);
      },
      async run(prepared, signal, output) {
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        show(output, ...pictures(answer.result, summary.value, textField.hidden ? url : null), timings(answer));
      },
    });
    fit();
    place.append(form.node);
    return {
      leave: form.stop,
      close() {
        URL.revokeObjectURL(url);
        form.stop();
      },
    };
  },
};
