import { call, CallError } from "../api.js";
import { wav } from "../audio.js";
import { addressed, bars, caller, check, chosen, field, modelChoice, modelField, timings } from "../controls.js";
import { duration, element, show } from "../dom.js";
import { tone } from "../examples.js";
import { base64, give } from "../images.js";

const MOST_LABELS = 8;

export const sounds = {
  id: "sounds",
  title: "Classify audio",
  tab: "Sounds",
  lead: "Choose a file; labels with probabilities for it.",
  capabilities: ["classify_audio"],
  open(place, served) {
    const model = modelChoice(served);
    const input = element("input", { type: "file", accept: "audio/*", required: true });
    const cut = check("Cut audio that is too long", true);
    const form = caller({
      fields: [
        modelField(model),
        field("Audio", input, "WAV, FLAC, OGG or MP3; others if the browser can decode them"),
        cut,
      ],
      label: "Classify",
      example: () => give(input, [tone()]),
      async prepare() {
        const [file] = input.files;
        if (!file) throw new CallError("invalid_argument", "Choose a file first.");
        const isRead = /(wav|wave|x-wav|flac|ogg|mpeg|mp3)$/.test(file.type);
        const { labels = [] } = chosen(model, served);
        const request = {
          ...addressed(model, served),
          audios: [await base64(isRead ? file : await wav(file))],
          topK: Math.min(MOST_LABELS, labels.length),
          truncate: cut.box.checked,
        };
        return { service: "AudioClassificationService", method: "ClassifyAudio", request };
      },
      async run(prepared, signal, output) {
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        const [result] = answer.results;
        const about = duration(result.durationSeconds ?? 0) + (result.truncated ? ", the beginning alone was read" : "");
        show(
          output,
          bars(result.labels.map((label) => [label.label, label.probability ?? 0, label.selected])),
          element("small", {}, about),
          timings(answer),
        );
      },
    });
    place.append(form.node);
    return { leave: form.stop, close: form.stop };
  },
};
