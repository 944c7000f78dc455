import { call, CallError } from "../api.js";
import { addressed, bars, caller, chosen, field, modelChoice, modelField, problem, slider, timings } from "../controls.js";
import { element, show } from "../dom.js";
import { ship } from "../examples.js";
import { base64, give, pointed } from "../images.js";

const COLOURS = [[59, 120, 216], [217, 130, 43], [58, 157, 93], [192, 57, 43], [142, 91, 199], [31, 163, 181]];
const LOOKED_FOR = "a person, a dog, a car"; // of models without labels of their own
const KINDS = { DEPTH_KIND_METRIC: "metres", DEPTH_KIND_INVERSE: "inverse: larger is nearer" };

/** Draws a grey PNG over a picture; `colour` changes the levels of a pixel in place. */
async function drawMap({ canvas }, png, colour) {
  const map = new Image();
  map.src = `data:image/png;base64,${png}`;
  await map.decode();
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.imageSmoothingEnabled = false;
  context.drawImage(map, 0, 0, canvas.width, canvas.height);
  if (!colour) return;
  const levels = context.getImageData(0, 0, canvas.width, canvas.height);
  for (let at = 0; at < levels.data.length; at += 4) levels.data.set(COLOURS[levels.data[at] % COLOURS.length], at);
  context.putImageData(levels, 0, 0);
}

export const maps = {
  id: "maps",
  title: "Label pixels, estimate depth",
  tab: "Maps",
  lead: "Draws over an image what each of its pixels shows, or how far away it is.",
  capabilities: ["classify_pixels", "estimate_depth"],
  open(place, served) {
    const model = modelChoice(served, suggest);
    const input = element("input", { type: "file", accept: "image/*", onchange: (event) => take(event) });
    const labels = element("input", { type: "text", autocomplete: "off" });
    const opacity = slider("Opacity", { min: 0, max: 1, step: 0.05, value: 0.6 });
    const picture = pointed();
    const looked = field("Labels", labels, "With commas between, for a model without labels of its own");

    /** Shows the labels, and fills them in, for a model that asks for them. */
    function suggest() {
      const { capabilities, labels: own } = chosen(model, served);
      looked.hidden = !capabilities.includes("classify_pixels") || Boolean(own?.length);
      if (!looked.hidden && !labels.value) labels.value = LOOKED_FOR;
    }

    async function take({ detail }) {
      try {
        if ((await picture.take(input.files[0])) && !detail?.isKept) form.submit();
      } catch (error) {
        show(form.output, problem(error));
      }
    }

    function fade() {
      picture.canvas.style.opacity = opacity.input.value;
    }

    const form = caller({
      fields: [modelField(model), field("Picture", input, "JPEG, PNG, WebP, BMP or GIF."), looked, opacity],
      label: "Draw",
      stage: picture.node,
      async example() {
        give(input, [await ship()]);
        return true;
      },
      async prepare() {
        if (!picture.file) throw new CallError("invalid_argument", "Choose an image first.");
        const { capabilities } = chosen(model, served);
        const isDepth = capabilities.includes("estimate_depth");
        return {
          service: isDepth ? "DepthEstimationService" : "SemanticSegmentationService",
          method: isDepth ? "EstimateDepth" : "ClassifyPixels",
          request: {
            ...addressed(model, served),
            images: [await base64(picture.file)],
            labels: looked.hidden ? undefined : labels.value.split(",").map((one) => one.trim()).filter(Boolean),
          },
        };
      },
      async run(prepared, signal, output) {
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        const [{ classMap, labels = [], png, minimum = 0, maximum = 0, kind }] = answer.results;
        picture.clear();
        await drawMap(picture, classMap ?? png, Boolean(classMap));
        fade();
        const range = `${minimum.toPrecision(4)} (black) to ${maximum.toPrecision(4)} (white), ${KINDS[kind] ?? "of a meaning that the model does not say"}`;
        const found = classMap ? bars(labels.map(({ label, share = 0 }) => [label, share, false])) : element("p", {}, range);
        show(output, found, timings(answer));
      },
    });
    opacity.input.addEventListener("input", fade);
    place.append(form.node);
    return {
      leave: form.stop,
      close() {
        picture.close();
        form.stop();
      },
    };
  },
};
