import { call, CallError } from "../api.js";
import { addressed, bars, caller, chosen, field, modelChoice, modelField, textArea, timings } from "../controls.js";
import { element, show } from "../dom.js";
import { ship } from "../examples.js";
import { base64, give, picture } from "../images.js";
import { looked } from "../viewer.js";

const MAX_IMAGES = 8;
const MOST_LABELS = 5;

/** Takes one picture with the camera. */
async function photograph() {
  const video = element("video", { autoplay: true, playsinline: true, muted: true });
  const media = await navigator.mediaDevices.getUserMedia({ video: true });
  try {
    video.srcObject = media;
    await video.play();
    const canvas = element("canvas", { width: video.videoWidth, height: video.videoHeight });
    canvas.getContext("2d").drawImage(video, 0, 0);
    const blob = await new Promise((done) => {
      canvas.toBlob(done, "image/jpeg", 0.9);
    });
    return new File([blob], "photograph.jpg", { type: blob.type });
  } finally {
    for (const track of media.getTracks()) track.stop();
  }
}

export const images = {
  id: "images",
  title: "Classify images",
  tab: "Images",
  lead: "Drop, paste or choose images; the model classifies them.",
  capabilities: ["classify_image", "label_image"],
  open(place, served) {
    let files = [];
    let urls = []; // of the files, in the same order
    const model = modelChoice(served);
    const own = textArea("", 2, { placeholder: "a dog, a horse, the sea" });
    const input = element("input", { type: "file", accept: "image/*", multiple: true, onchange: (event) => take(event) });

    function forget() {
      urls.forEach((url) => URL.revokeObjectURL(url));
    }

    /** A picture with what is told of it beside. */
    function pictured(index, ...told) {
      return element("section", { class: "result labelled-picture" }, picture({ src: urls[index], alt: files[index].name }), ...told);
    }

    function take({ detail }) {
      forget();
      files = [...input.files].filter((file) => file.type.startsWith("image/")).slice(0, MAX_IMAGES);
      urls = files.map((file) => URL.createObjectURL(file));
      show(form.output, ...files.map((_, index) => pictured(index)));
      if (files.length && !detail?.isKept) form.submit();
    }

    const camera = element(
      "button",
      {
        type: "button",
        onclick: async () => {
          try {
            give(input, [await photograph()]);
          } catch {
            show(form.output, element("p", { class: "problem", role: "alert" }, "The camera cannot be used here."));
          }
        },
      },
      "Use the camera",
    );
    const form = caller({
      fields: [
        modelField(model),
        field("Pictures", input, `JPEG, PNG, WebP, BMP or GIF; up to ${MAX_IMAGES}. Drop them anywhere, or paste.`),
        camera,
        field("Labels of your own", own, "Separated by commas; for a model that shares an embedding space with texts."),
      ],
      label: "Classify",
      async example() {
        give(input, [await ship()]);
        return true;
      },
      async prepare() {
        if (!files.length) throw new CallError("invalid_argument", "Choose an image first.");
        const { labels: known = [] } = chosen(model, served);
        const candidateLabels = own.value.split(",").map((label) => label.trim()).filter(Boolean);
        const labels = candidateLabels.length ? candidateLabels : known;
        if (!labels.length) throw new CallError("invalid_argument", "This model has no labels: enter some.");
        const request = { ...addressed(model, served), images: await Promise.all(files.map(base64)), topK: Math.min(MOST_LABELS, labels.length) };
        if (candidateLabels.length) request.candidateLabels = candidateLabels;
        return { service: "ImageClassificationService", method: "ClassifyImage", request };
      },
      async run(prepared, signal, output) {
        const model_ = chosen(model, served);
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        show(
          output,
          ...answer.results.map((result, index) =>
            pictured(
              index,
              bars(result.labels.map((label) => [label.label, label.probability ?? 0, label.selected])),
              looked(model_, { image: prepared.request.images[index] }, { url: urls[index] }),
            ),
          ),
          timings(answer),
        );
      },
    });
    place.append(form.node);
    return {
      leave: form.stop,
      close() {
        forget();
        form.stop();
      },
    };
  },
};
