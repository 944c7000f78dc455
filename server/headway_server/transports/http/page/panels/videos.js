import { call, CallError } from "../api.js";
import { addressed, bars, caller, chosen, field, modelChoice, modelField, number, timings } from "../controls.js";
import { element, show } from "../dom.js";
import { frames as exampleFrames } from "../examples.js";
import { base64, give } from "../images.js";

const MOST_LABELS = 8;
const MOST_FRAMES = 64;
const LONGEST_SIDE = 512; // pixels of a frame that is sent

function once(target, name) {
  return new Promise((resolve, reject) => {
    target.addEventListener(name, resolve, { once: true });
    target.addEventListener("error", () => reject(new CallError("invalid_argument", "The browser cannot read this video.")), { once: true });
  });
}

/** Takes frames of a video evenly, from its beginning to its end, as JPEG. */
async function framesOf(file, count) {
  const video = element("video", { muted: true, preload: "auto" });
  const url = URL.createObjectURL(file);
  try {
    video.src = url;
    await once(video, "loadeddata");
    const scale = Math.min(1, LONGEST_SIDE / Math.max(video.videoWidth, video.videoHeight));
    const canvas = element("canvas", { width: Math.round(video.videoWidth * scale), height: Math.round(video.videoHeight * scale) });
    const context = canvas.getContext("2d");
    const frames = [];
    for (let number = 0; number < count; number += 1) {
      video.currentTime = (video.duration * (number + 0.5)) / count;
      await once(video, "seeked");
      context.drawImage(video, 0, 0, canvas.width, canvas.height);
      frames.push(await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.95)));
    }
    return frames;
  } finally {
    URL.revokeObjectURL(url);
  }
}

export const videos = {
  id: "videos",
  title: "Classify a video",
  tab: "Videos",
  lead: "Choose a video, or its frames as pictures; labels with probabilities for it.",
  capabilities: ["classify_video"],
  open(place, served) {
    const model = modelChoice(served);
    const input = element("input", { type: "file", accept: "video/*,image/*", multiple: true, required: true });
    const count = number({ min: 1, max: MOST_FRAMES, step: 1 });
    count.value = 16;
    const form = caller({
      fields: [
        modelField(model),
        field("Video", input, "What the browser plays, or pictures in the order of their names"),
        field("Frames", count, "Taken evenly from a video; the model reads as many of them as it was trained on"),
      ],
      label: "Classify",
      example: async () => give(input, await exampleFrames(16)),
      async prepare() {
        const files = [...input.files].toSorted((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
        if (!files.length) throw new CallError("invalid_argument", "Choose a video first.");
        const frames = files[0].type.startsWith("video/") ? await framesOf(files[0], Number(count.value) || 16) : files;
        const { labels = [] } = chosen(model, served);
        const request = {
          ...addressed(model, served),
          frames: await Promise.all(frames.map((frame) => base64(frame))),
          topK: Math.min(MOST_LABELS, labels.length),
        };
        return { service: "VideoClassificationService", method: "ClassifyVideo", request };
      },
      async run(prepared, signal, output) {
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        const [result] = answer.results;
        const read = new Set(result.frameIndices ?? []).size;
        show(
          output,
          bars(result.labels.map((label) => [label.label, label.probability ?? 0, label.selected])),
          element("small", {}, `${read} of ${prepared.request.frames.length} frames were read`),
          timings(answer),
        );
      },
    });
    place.append(form.node);
    return { leave: form.stop, close: form.stop };
  },
};
