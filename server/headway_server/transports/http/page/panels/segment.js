import { call, CallError } from "../api.js";
import { addressed, caller, field, modelChoice, modelField, problem, timings } from "../controls.js";
import { drawn, element, enter, show, written } from "../dom.js";
import { balloon } from "../examples.js";
import { base64, give, places, pointed } from "../images.js";

const LEAST_DRAG = 4; // pixels of the screen below which a drag is a click
const INSIDE = [230, 60, 60, 110]; // red, green, blue and opacity of a segment
const MARK_RADIUS = 5;
const WIDTH_OF_CANDIDATE = 208; // pixels
const HELP = "Click the part to cut out; shift-click what is not part of it; drag a box around it.";

/** Returns a mask's pixels, 0 or 1 row by row, from its run lengths by columns. */
function pixelsOf({ counts = [], width, height }) {
  const pixels = new Uint8Array(width * height);
  let at = 0;
  counts.forEach((count, index) => {
    const end = at + count;
    if (index % 2) for (; at < end; at += 1) pixels[(at % height) * width + Math.floor(at / height)] = 1;
    at = end;
  });
  return pixels;
}

/** Paints a mask over a canvas of its size or a smaller one. */
function paint(canvas, pixels, width, height) {
  const context = canvas.getContext("2d");
  const layer = context.createImageData(canvas.width, canvas.height);
  for (let y = 0; y < canvas.height; y += 1) {
    const row = Math.floor((y * height) / canvas.height) * width;
    for (let x = 0; x < canvas.width; x += 1) {
      if (pixels[row + Math.floor((x * width) / canvas.width)]) layer.data.set(INSIDE, 4 * (y * canvas.width + x));
    }
  }
  context.putImageData(layer, 0, 0);
}

/** Returns the borders between a mask's inside and outside as a path. */
function edgeOf(pixels, width, height) {
  const isInside = (x, y) => x >= 0 && x < width && y >= 0 && y < height && pixels[y * width + x] === 1;
  const parts = [];
  for (let y = 0; y <= height; y += 1) {
    for (let x = 0; x <= width; x += 1) {
      if (isInside(x, y) !== isInside(x, y - 1)) parts.push(`M${x} ${y}h1`);
      if (isInside(x, y) !== isInside(x - 1, y)) parts.push(`M${x} ${y}v1`);
    }
  }
  return parts.join("");
}

export const segment = {
  id: "segment",
  title: "Cut out",
  tab: "Segments",
  lead: "Choose an image and click: a click is a point inside, shift-click outside, a drag makes a box.",
  capabilities: ["segment_image"],
  open(place, served) {
    let imageId = null;
    let taken = null; // the last picture: a promise
    let start = null; // where the mouse went down, in pixels of the image
    const model = modelChoice(served, () => {
      imageId = null;
    });
    const input = element("input", {
      type: "file",
      accept: "image/*",
      onchange: (event) => {
        taken = take(event);
      },
    });
    const inside = element("input", { type: "text", placeholder: "120,80 200,90", autocomplete: "off" });
    const outside = element("input", { type: "text", placeholder: "20,30", autocomplete: "off" });
    const box = element("input", { type: "text", placeholder: "60,40,200,180", autocomplete: "off" });
    const picture = pointed();
    const { canvas, marks } = picture;

    function wipe() {
      picture.clear();
      show(form.output, element("p", { class: "empty" }, HELP));
    }

    function clear() {
      for (const each of [inside, outside, box]) enter(each, "");
      if (picture.file) wipe();
    }

    async function take({ detail }) {
      imageId = null;
      if (!detail?.isKept) clear();
      try {
        if (await picture.take(input.files[0])) wipe();
      } catch (error) {
        show(form.output, problem(error));
      }
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
        enter(box, [sides[0][0], sides[1][0], sides[0][1], sides[1][1]].join(","));
      } else {
        const into = event.shiftKey ? outside : inside;
        enter(into, `${into.value} ${end.join(",")}`.trim());
      }
      start = null;
      form.submit();
    });

    function mark(points, colour) {
      marks.append(...points.map(([cx, cy]) => drawn("circle", { cx, cy, r: MARK_RADIUS * picture.scale(), fill: colour })));
    }

    function showMask(pixels, width, height) {
      paint(canvas, pixels, width, height);
      const d = edgeOf(pixels, width, height);
      show(marks, drawn("path", { class: "halo", d }), drawn("path", { d }));
      const [sides] = places(box.value, 4);
      if (sides) marks.append(drawn("rect", { x: sides[0], y: sides[1], width: sides[2] - sides[0], height: sides[3] - sides[1] }));
      mark(places(inside.value, 2), "#1a8f3c");
      mark(places(outside.value, 2), "#b3261e");
    }

    function figures({ predictedIou = 0, stability = 0 }) {
      return [`predicted IoU ${written(predictedIou, 2)}`, `stability ${written(stability, 2)}`];
    }

    /** The masks to choose from, the best first, and what is known of the chosen one. */
    function candidates(masks) {
      const facts = element("p");
      const pixels = masks.map(pixelsOf);
      const buttons = masks.map((mask, index) => {
        const width = Math.min(mask.width, WIDTH_OF_CANDIDATE);
        const small = element("canvas", { width, height: Math.ceil((width * mask.height) / mask.width), "aria-hidden": "true" });
        paint(small, pixels[index], mask.width, mask.height);
        return element(
          "button",
          { type: "button", class: "candidate", "aria-pressed": "false", onclick: () => pick(index) },
          small,
          element("span", {}, `Mask ${index + 1}`),
          ...figures(mask).map((figure) => element("small", {}, figure)),
        );
      });
      const pick = (chosen_) => {
        const mask = masks[chosen_];
        const { left = 0, top = 0, right = 0, bottom = 0 } = mask.box ?? {};
        buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(index === chosen_)));
        facts.textContent = [`${written(mask.area ?? 0)} pixels`, ...figures(mask), `box ${left}, ${top}, ${right}, ${bottom}`].join(" · ");
        showMask(pixels[chosen_], mask.width, mask.height);
      };
      pick(0);
      return [masks.length > 1 && element("div", { class: "candidates", role: "group", "aria-label": "Masks" }, ...buttons), facts];
    }

    const again = element("button", { type: "button", onclick: clear }, "Start over");
    const form = caller({
      fields: [
        modelField(model),
        field("Picture", input, "JPEG, PNG, WebP, BMP or GIF."),
        field("Points inside", inside, "x,y in pixels; clicks write them here."),
        field("Points outside", outside, "A click with the shift key."),
        field("Box", box, "left,top,right,bottom; a drag over the image."),
        again,
      ],
      label: "Cut out",
      stage: picture.node,
      async example() {
        give(input, [await balloon()]);
        await taken;
        enter(inside, balloon.star);
      },
      async prepare() {
        if (!picture.file) throw new CallError("invalid_argument", "Choose an image first.");
        const points = [
          ...places(inside.value, 2).map(([x, y]) => ({ x, y })),
          ...places(outside.value, 2).map(([x, y]) => ({ x, y, outside: true })),
        ];
        const [sides] = places(box.value, 4);
        const prompt = { points };
        if (sides) prompt.box = { left: sides[0], top: sides[1], right: sides[2], bottom: sides[3] };
        const named = addressed(model, served);
        if (!imageId) {
          const prepared = await call("ImageService", "PrepareImage", { ...named, images: [await base64(picture.file)] });
          imageId = prepared.results[0].imageId;
        }
        return { service: "SegmentationService", method: "SegmentImage", request: { ...named, image: "picture", prompts: [prompt] } };
      },
      async run(prepared, signal, output) {
        let answer;
        try {
          answer = await call(prepared.service, prepared.method, { ...prepared.request, image: undefined, imageId }, { signal });
        } catch (error) {
          if (error.code === "not_found") imageId = null; // forgotten meanwhile: the next call sends it again
          throw error;
        }
        show(output, ...candidates(answer.results[0].masks), timings(answer));
      },
    });
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
