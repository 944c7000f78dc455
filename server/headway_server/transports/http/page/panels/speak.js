import { stream } from "../api.js";
import { player, wavOf } from "../audio.js";
import { addressed, caller, choice, chosen, field, modelChoice, modelField, number, sampling, textArea, timings } from "../controls.js";
import { duration, element, refill, show } from "../dom.js";
import { fromBase64 } from "../images.js";

const EXAMPLE = "three seven one";

export const speak = {
  id: "speak",
  title: "Speak",
  lead: "A text, spoken in one of the model's voices and played as it is generated.",
  capabilities: ["synthesize_speech"],
  open(place, served) {
    let url = ""; // of what was spoken
    const voice = choice([]);
    const text = textArea(EXAMPLE, 3, { required: true });
    const sampled = sampling();
    const longest = number({ min: 0, step: 0.01 });
    const offer = () => {
      const { labels = [], defaultParameters } = chosen(model, served);
      show(voice, element("option", { value: "" }, "The model chooses"), ...labels.map((label) => element("option", {}, label)));
      sampled.expect(defaultParameters?.sampling);
    };
    const model = modelChoice(served, offer);
    offer();
    const form = caller({
      isLive: true,
      fields: [
        modelField(model),
        field("Text", text, "Ctrl+Enter speaks."),
        field("Voice", voice),
        element(
          "details",
          {},
          element("summary", {}, "All parameters"),
          element("div", { class: "grid" }, sampled.temperature, ...sampled.others, sampled.seed, field("Longest audio", longest, "Seconds")),
        ),
      ],
      label: "Speak",
      example: () => refill(text, EXAMPLE),
      prepare() {
        const common = {
          ...addressed(model, served),
          voice: voice.value || undefined,
          parameters: { sampling: sampled.given(), maxDurationSeconds: longest.given() },
        };
        return {
          service: "SpeechService",
          method: "StreamSynthesizeSpeech",
          request: { ...common, text: text.value },
          whole: { ...common, texts: [text.value] },
        };
      },
      async run(prepared, signal, output) {
        const note = element("p", { class: "timings" }, "waiting for the first audio …");
        show(output, note);
        const parts = [];
        const began = performance.now();
        let playing = null;
        let firstAfter = 0; // seconds
        let seconds = 0;
        try {
          for await (const message of stream(prepared.service, prepared.method, prepared.request, { signal })) {
            const { pcm, samplingRate, result } = message;
            if (pcm) {
              const samples = new Int16Array(fromBase64(pcm).buffer);
              firstAfter ||= (performance.now() - began) / 1000;
              playing ??= player(samplingRate);
              playing.add(samples);
              parts.push(samples);
              seconds += samples.length / samplingRate;
              note.textContent = `first audio after ${duration(firstAfter)}, ${duration(seconds)} of audio`;
            }
            if (!result) continue;
            if (result.finishReason === "FINISH_REASON_LENGTH") note.textContent += ", cut at the length limit";
            note.textContent += `; seed ${result.seed ?? "0"}`;
            URL.revokeObjectURL(url);
            url = URL.createObjectURL(wavOf(parts, result.samplingRate));
            const again = element("audio", { controls: true, src: url, "aria-label": "Synthesized speech", onplay: () => form.stop() });
            const file = element("a", { href: url, download: `${prepared.request.model}-${result.seed ?? "0"}.wav` }, "Download WAV");
            output.append(element("div", { class: "heard" }, again, file), timings(message) ?? "");
          }
          await playing?.ended(signal);
        } catch (error) {
          note.textContent = error.name === "AbortError" ? `${parts.length ? note.textContent : "no audio"}; stopped` : "";
          throw error;
        } finally {
          playing?.close();
        }
      },
    });
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
