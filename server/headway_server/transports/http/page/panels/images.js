import { call, CallError } from "../api.js";
import { bars, caller, chosen, field, modelChoice, textArea, timings } from "../controls.js";
import { element, show } from "../dom.js";
import { base64 } from "../images.js";
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
    return await new Promise((done) => {
      canvas.toBlob(done, "image/jpeg", 0.9);
    });
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
    const input = element("input", { type: "file", accept: "image/*", multiple: true });
    const thumbnails = element("ul", { class: "thumbnails", "aria-label": "Pictures" });

    function take(some) {
      files = [...some].filter((file) => file.type.startsWith("image/")).slice(0, MAX_IMAGES);
      urls.forEach((url) => URL.revokeObjectURL(url));
      urls = files.map((file) => URL.createObjectURL(file));
      show(thumbnails, ...files.map((file, index) => element("li", {}, element("img", { src: urls[index], alt: file.name ?? "picture" }))));
      if (files.length) form.submit();
    }

    const camera = element(
      "button",
      {
        type: "button",
        onclick: async () => {
          try {
            take([await photograph()]);
          } catch {
            show(form.output, element("p", { class: "problem", role: "alert" }, "The camera cannot be used here."));
          }
        },
      },
      "Use the camera",
    );
    const drop = element(
      "div",
      {
        class: "drop",
        ondragover: (event) => event.preventDefault(),
        ondrop: (event) => {
          event.preventDefault();
          take(event.dataTransfer.files);
        },
      },
      field("Pictures", input, `JPEG, PNG, WebP, BMP or GIF; up to ${MAX_IMAGES}. Drop them here, or paste.`),
      camera,
      thumbnails,
    );
    const form = caller({
      fields: [
        field("Model", model),
        field("Labels of your own", own, "Separated by commas; for a model that shares an embedding space with texts."),
        drop,
      ],
      label: "Classify",
      async prepare() {
        if (!files.length) throw new CallError("invalid_argument", "Choose an image first.");
        const { name, labels: known = [] } = chosen(model, served);
        const candidateLabels = own.value.split(",").map((label) => label.trim()).filter(Boolean);
        const labels = candidateLabels.length ? candidateLabels : known;
        if (!labels.length) throw new CallError("invalid_argument", "This model has no labels: enter some.");
        const request = { model: name, images: await Promise.all(files.map(base64)), topK: Math.min(MOST_LABELS, labels.length) };
        if (candidateLabels.length) request.candidateLabels = candidateLabels;
        return { service: "ImageClassificationService", method: "ClassifyImage", request };
      },
      async run(prepared, signal, output) {
        const model_ = chosen(model, served);
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        show(
          output,
          ...answer.results.map((result, index) =>
            element(
              "section",
              { class: "result picture" },
              element("img", { src: urls[index], alt: files[index].name ?? "picture" }),
              bars(result.labels.map((label) => [label.label, label.probability ?? 0, label.selected])),
              looked(model_, { image: prepared.request.images[index] }, { url: urls[index] }),
            ),
          ),
          timings(answer),
        );
      },
    });
    input.addEventListener("change", () => take(input.files));
    const pasted = (event) => {
      if (place.isConnected && event.clipboardData?.files.length) take(event.clipboardData.files);
    };
    addEventListener("paste", pasted);
    place.append(form.node);
    return {
      leave: form.stop,
      close() {
        removeEventListener("paste", pasted);
        urls.forEach((url) => URL.revokeObjectURL(url));
        form.stop();
      },
    };
  },
};
