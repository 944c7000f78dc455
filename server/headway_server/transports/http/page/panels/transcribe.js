import { call, CallError } from "../api.js";
import { record, wav } from "../audio.js";
import { addressed, caller, check, choice, chosen, field, language, modelChoice, modelField, number, problem, timings } from "../controls.js";
import { duration, element, show } from "../dom.js";
import { base64, fromBase64, give } from "../images.js";

const EXAMPLE = "three seven one";
const DETECTED = ""; // in place of a language

function segments(result) {
  const time = (seconds) => `${(seconds ?? 0).toFixed(2)} s`;
  return element(
    "ol",
    { class: "segments" },
    ...result.segments.map((one) => element("li", {}, element("small", {}, `${time(one.startSeconds)} – ${time(one.endSeconds)}`), " ", (one.text ?? "").trim())),
  );
}

export const transcribe = {
  id: "transcribe",
  title: "Transcribe",
  lead: "Record speech or choose a file, and read the transcript.",
  capabilities: ["transcribe_speech"],
  open(place, served, { all }) {
    let recording = null; // under way
    let audio = null; // {blob, url}: what is transcribed
    const spoken = choice([]);
    const times = check("Times of the segments", false);
    const offer = () => {
      const { targetLanguages: codes = [], capabilities } = chosen(model, served);
      const options = codes.map((code) => [code, language(code)]).sort((one, other) => one[1].localeCompare(other[1]));
      if (codes.length !== 1) options.unshift([DETECTED, codes.length ? "Detected" : "The model's"]);
      show(spoken, ...options.map(([code, name]) => element("option", { value: code }, name)));
      spoken.disabled = options.length < 2;
      times.box.disabled = !capabilities.includes("time_speech");
      times.box.checked &&= !times.box.disabled;
    };
    const model = modelChoice(served, offer);
    offer();
    const player = element("audio", { controls: true, "aria-label": "Recording or file" });
    const heard = element("div", { class: "heard", hidden: true }, player);
    const take = (blob) => {
      if (audio) URL.revokeObjectURL(audio.url);
      audio = { blob, url: URL.createObjectURL(blob) };
      player.src = audio.url;
      heard.hidden = false;
      form.submit();
    };
    const input = element("input", { type: "file", accept: "audio/*", onchange: () => input.files.length && take(input.files[0]) });
    const button = element("button", { type: "button", "aria-pressed": "false", onclick: toggle }, "Record");
    const beams = number({ min: 1, max: 8, step: 1, value: 1 });

    async function toggle() {
      button.disabled = true;
      try {
        if (recording) {
          const ended = recording;
          recording = null;
          const blob = await ended.stop();
          input.value = "";
          take(await wav(blob));
        } else recording = await record();
      } catch (error) {
        show(form.output, problem(error));
      }
      button.disabled = false;
      tell();
    }

    const voice = all.find((one) => one.capabilities.includes("synthesize_speech")); // which speaks the example

    async function example() {
      const { results } = await call("SpeechService", "SynthesizeSpeech", { model: voice.name, modelVersion: voice.version, texts: [EXAMPLE], parameters: { sampling: { seed: "1" } } });
      give(input, [new File([fromBase64(results[0].audio)], "example.wav", { type: "audio/wav" })]);
      return true;
    }

    function tell() {
      button.setAttribute("aria-pressed", String(recording !== null));
      button.textContent = recording ? "Stop and transcribe" : "Record";
    }

    const form = caller({
      fields: [
        modelField(model),
        element("div", { class: "row" }, button),
        field("Audio", input, "WAV, FLAC, OGG or MP3; others if the browser can decode them"),
        heard,
        field("Language", spoken),
        field("Beams", beams, "1 is greedy"),
        times,
      ],
      label: "Transcribe",
      example: voice && example,
      async prepare() {
        if (!audio) throw new CallError("invalid_argument", "Record something, or choose a file first.");
        const isRead = /(wav|wave|x-wav|flac|ogg|mpeg|mp3)$/.test(audio.blob.type);
        const request = {
          ...addressed(model, served),
          audios: [await base64(isRead ? audio.blob : await wav(audio.blob))],
          parameters: { beamSize: beams.given() },
        };
        if (spoken.value) request.language = spoken.value;
        if (times.box.checked) request.includeTimestamps = true;
        return { service: "SpeechService", method: "TranscribeSpeech", request };
      },
      async run(prepared, signal, output) {
        show(output);
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        const [result] = answer.results;
        const about = [duration(result.durationSeconds ?? 0), result.language && language(result.language)].filter(Boolean);
        show(
          output,
          element("p", { class: "transcript", lang: result.language }, result.text || "No speech was found."),
          prepared.request.includeTimestamps && segments(result),
          element("small", {}, about.join(" · ")),
          timings(answer),
        );
      },
    });
    place.append(form.node);
    const leave = () => {
      recording?.stop();
      recording = null;
      tell();
      form.stop();
    };
    return {
      leave,
      close() {
        if (audio) URL.revokeObjectURL(audio.url);
        leave();
      },
    };
  },
};
