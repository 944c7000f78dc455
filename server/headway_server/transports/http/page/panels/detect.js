import { call, CallError } from "../api.js";
import { addressed, bars, caller, chosen, field, modelChoice, modelField, number, problem, timings } from "../controls.js";
import { drawn, element, show } from "../dom.js";
import { balloon } from "../examples.js";
import { base64, give, pointed } from "../images.js";

const COLOURS = ["#3b78d8", "#d9822b", "#3a9d5d", "#c0392b", "#8e5bc7", "#1fa3b5"];
const LETTER = 14; // pixels of the screen
const LOOKED_FOR = "a person, a dog, a red car"; // of models without labels of their own

/** Draws boxes with their labels over a picture, the best last. */
function drawBoxes(picture, objects) {
  const size = LETTER * picture.scale();
  for (const { label, labelIndex = 0, score = 0, box: { left = 0, top = 0, right = 0, bottom = 0 } = {} } of objects.toReversed()) {
    const colour = COLOURS[labelIndex % COLOURS.length];
    const [x, y] = [Math.max(left, 0) + size / 3, Math.max(top, 0) + size];
    picture.marks.append(
      drawn("rect", { x: left, y: top, width: right - left, height: bottom - top, stroke: colour }),
      drawn("text", { x, y, "font-size": size, stroke: colour, "stroke-width": size / 3 }, `${label} ${score.toFixed(2)}`),
    );
  }
}

export const detect = {
  id: "detect",
  title: "Find objects",
  tab: "Objects",
  lead: "Finds objects in an image and draws a box around each.",
  capabilities: ["detect_object"],
  open(place, served) {
    const model = modelChoice(served, suggest);
    const input = element("input", { type: "file", accept: "image/*", onchange: (event) => take(event) });
    const threshold = number({ min: 0, max: 1, step: 0.05 });
    const overlap = number({ min: 0, max: 1, step: 0.05 });
    const labels = element("input", { type: "text", autocomplete: "off" });
    const picture = pointed();

    /** Fills in labels for a model without any, and takes them out for another. */
    function suggest() {
      const needsLabels = !chosen(model, served).labels?.length;
      if (needsLabels && !labels.value) labels.value = LOOKED_FOR;
      else if (!needsLabels && labels.value === LOOKED_FOR) labels.value = "";
    }

    async function take({ detail }) {
      try {
        if ((await picture.take(input.files[0])) && !detail?.isKept) form.submit();
      } catch (error) {
        show(form.output, problem(error));
      }
    }

    const form = caller({
      fields: [
        modelField(model),
        field("Picture", input, "JPEG, PNG, WebP, BMP or GIF."),
        field("Threshold", threshold, "Empty: the model's, mostly 0.5"),
        field("Overlap", overlap, "Of boxes of a label, above which the worse is left out; empty: the model's"),
        field("Labels", labels, "With commas between. Labels of the model, empty: all; any texts for a model without labels"),
      ],
      label: "Find",
      stage: picture.node,
      async example() {
        give(input, [await balloon()]);
        return true;
      },
      async prepare() {
        if (!picture.file) throw new CallError("invalid_argument", "Choose an image first.");
        return {
          service: "ObjectDetectionService",
          method: "DetectObjects",
          request: {
            ...addressed(model, served),
            images: [await base64(picture.file)],
            threshold: threshold.given(),
            nmsThreshold: overlap.given(),
            labels: labels.value.split(",").map((one) => one.trim()).filter(Boolean),
          },
        };
      },
      async run(prepared, signal, output) {
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        const [{ objects = [] }] = answer.results;
        picture.clear();
        drawBoxes(picture, objects);
        const found = objects.length ? bars(objects.map(({ label, score = 0 }) => [label, score, false])) : element("p", { class: "empty" }, "No object");
        show(output, found, timings(answer));
      },
    });
    suggest();
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
