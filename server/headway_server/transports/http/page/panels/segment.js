import { call, CallError } from "../api.js";
import { caller, chosen, field, modelChoice, timings } from "../controls.js";
import { element, show, written } from "../dom.js";
import { base64, places, pointed } from "../images.js";

const LEAST_DRAG = 4; // pixels of the screen below which a drag is a click
const INSIDE = [230, 60, 60, 140]; // red, green, blue and opacity of a segment
const MARK_RADIUS = 4;

/** Draws a mask from its run lengths by columns, at the image's size. */
function drawMask(context, { counts = [], width, height }) {
  const pixels = context.createImageData(width, height);
  let at = 0;
  counts.forEach((count, index) => {
    for (let end = at + count; at < end; at += 1) {
      if (index % 2) pixels.data.set(INSIDE, 4 * ((at % height) * width + Math.floor(at / height)));
    }
  });
  context.putImageData(pixels, 0, 0);
}

export const segment = {
  id: "segment",
  title: "Cut out",
  tab: "Segments",
  lead: "Choose an image and click: a click is a point inside, shift-click outside, a drag makes a box.",
  capabilities: ["segment_image"],
  open(place, served) {
    let file = null;
    let imageId = null;
    let start = null; // where the mouse went down, in pixels of the image
    const model = modelChoice(served);
    const input = element("input", { type: "file", accept: "image/*" });
    const inside = element("input", { type: "text", placeholder: "120,80 200,90", autocomplete: "off" });
    const outside = element("input", { type: "text", placeholder: "20,30", autocomplete: "off" });
    const box = element("input", { type: "text", placeholder: "60,40,200,180", autocomplete: "off" });
    const picture = pointed();
    const { canvas, image } = picture;

    function clear() {
      for (const each of [inside, outside, box]) each.value = "";
      picture.clear();
      show(form.output);
    }

    async function take([chosenFile]) {
      if (!chosenFile?.type.startsWith("image/")) return;
      [file, imageId] = [chosenFile, null];
      await picture.take(file);
      clear();
    }

    picture.node.addEventListener("pointerdown", (event) => {
      start = { at: picture.at(event), x: event.clientX, y: event.clientY };
      picture.node.setPointerCapture(event.pointerId);
    });
    picture.node.addEventListener("pointerup", (event) => {
      if (!start) return;
      const end = picture.at(event);
      if (Math.hypot(event.clientX - start.x, event.clientY - start.y) >= LEAST_DRAG) {
        const sides = [0, 1].map((axis) => [start.at[axis], end[axis]].sort((one, other) => one - other));
        box.value = [sides[0][0], sides[1][0], sides[0][1], sides[1][1]].join(",");
      } else {
        const into = event.shiftKey ? outside : inside;
        into.value = `${into.value} ${end.join(",")}`.trim();
      }
      start = null;
      form.submit();
    });

    function mark(context, points, colour) {
      context.fillStyle = colour;
      const radius = (MARK_RADIUS * canvas.width) / (image.clientWidth || canvas.width);
      for (const [x, y] of points) {
        context.beginPath();
        context.arc(x, y, radius, 0, 2 * Math.PI);
        context.fill();
      }
    }

    const again = element("button", { type: "button", onclick: clear }, "Start over");
    const form = caller({
      fields: [
        field("Model", model),
        field("Picture", input, "JPEG, PNG, WebP, BMP or GIF."),
        picture.node,
        field("Points inside", inside, "x,y in pixels; clicks write them here."),
        field("Points outside", outside, "A click with the shift key."),
        field("Box", box, "left,top,right,bottom; a drag over the image."),
        again,
      ],
      label: "Cut out",
      async prepare() {
        if (!file) throw new CallError("invalid_argument", "Choose an image first.");
        const points = [
          ...places(inside.value, 2).map(([x, y]) => ({ x, y })),
          ...places(outside.value, 2).map(([x, y]) => ({ x, y, outside: true })),
        ];
        const [sides] = places(box.value, 4);
        const prompt = { points };
        if (sides) prompt.box = { left: sides[0], top: sides[1], right: sides[2], bottom: sides[3] };
        const { name } = chosen(model, served);
        if (!imageId) {
          const prepared = await call("ImageService", "PrepareImage", { model: name, images: [await base64(file)] });
          imageId = prepared.results[0].imageId;
        }
        return {
          service: "SegmentationService",
          method: "SegmentImage",
          request: { model: name, imageId, prompts: [prompt], maxMaskCount: 1 },
        };
      },
      async run(prepared, signal, output) {
        let answer;
        try {
          answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        } catch (error) {
          if (error.code === "not_found") imageId = null; // forgotten meanwhile: the next call sends it again
          throw error;
        }
        const [mask] = answer.results[0].masks;
        const context = canvas.getContext("2d");
        drawMask(context, mask);
        mark(context, places(inside.value, 2), "#1a8f3c");
        mark(context, places(outside.value, 2), "#b3261e");
        const { left = 0, top = 0, right = 0, bottom = 0 } = mask.box ?? {};
        const facts = [
          `${written(mask.area ?? 0)} pixels`,
          `predicted IoU ${written(mask.predictedIou ?? 0, 2)}`,
          `stability ${written(mask.stability ?? 0, 2)}`,
          `box ${left}, ${top}, ${right}, ${bottom}`,
        ];
        show(output, element("p", {}, facts.join(" · ")), timings(answer));
      },
    });
    input.addEventListener("change", () => take(input.files));
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
