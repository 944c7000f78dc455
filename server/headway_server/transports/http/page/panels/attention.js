import { call, CallError } from "../api.js";
import { caller, chosen, field, modelChoice, textArea, timings } from "../controls.js";
import { element, show } from "../dom.js";
import { base64 } from "../images.js";
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
  lead: "Attention of a model: every head of every layer, or a summary.",
  capabilities: Object.keys(METHODS),
  open(place, served) {
    const model = modelChoice(served, () => fit());
    const text = textArea("", 3, { required: true });
    const input = element("input", { type: "file", accept: "image/*" });
    const summary = summaryChoice();
    const textField = field("Text", text);
    const imageField = field("Picture", input);

    function fit() {
      const { task, capabilities } = chosen(model, served);
      const isImage = capabilities.includes("inspect_image");
      textField.hidden = isImage;
      text.required = !isImage;
      imageField.hidden = !isImage;
      if (!text.value || Object.values(EXAMPLES).includes(text.value)) text.value = EXAMPLES[task] ?? "";
    }

    let url = null; // of the picture that was looked into

    const form = caller({
      fields: [field("Model", model), textField, imageField, field("Heads", summary)],
      label: "Look",
      async prepare() {
        const read = {};
        if (!textField.hidden) read.text = text.value;
        else if (input.files.length) read.image = await base64(input.files[0]);
        else throw new CallError("invalid_argument", "Choose an image first.");
        return inspection(chosen(model, served), read, summary.value);
      },
      async run(prepared, signal, output) {
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        URL.revokeObjectURL(url);
        url = input.files.length ? URL.createObjectURL(input.files[0]) : null;
        show(output, ...pictures(answer.result, url), timings(answer));
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
