import { call, CallError, stream } from "../api.js";
import { addressed, caller, choice, chosen, field, modelChoice, modelField, number, problem, slider, textArea, timings } from "../controls.js";
import { element, enter, listOf, show } from "../dom.js";
import { base64, fromBase64, give, picture as pictureOf, places, pointed } from "../images.js";

const DEFAULT_STEPS = 20; // the protocol's
const NUM_PREVIEWS = 10;
const STRENGTH = 0.8; // the protocol's, without a mask
const STRENGTH_OF_MASK = 1;
const PAINT = "#e63c3c";
const SAMPLERS = [
  ["DIFFUSION_SAMPLER_UNSPECIFIED", "The model's own"],
  ["DIFFUSION_SAMPLER_DPM_SOLVER_PP_2M", "DPM-Solver++(2M)"],
  ["DIFFUSION_SAMPLER_DDIM", "DDIM"],
  ["DIFFUSION_SAMPLER_EULER", "Euler"],
  ["DIFFUSION_SAMPLER_EULER_ANCESTRAL", "Euler, ancestral"],
  ["DIFFUSION_SAMPLER_DDPM", "DDPM"],
  ["DIFFUSION_SAMPLER_PNDM", "PNDM"],
  ["DIFFUSION_SAMPLER_UNIPC", "UniPC"],
  ["DIFFUSION_SAMPLER_LCM", "LCM"],
];

/** An image to edit, which is the `stage`, and its mask: `request()` has the fields of both, and the strength. */
function ground(say) {
  let strokes = []; // {width, points} in pixels of the picture
  let wasMasked = false;
  const picture = pointed();
  const input = element("input", { type: "file", accept: "image/*", onchange: (event) => take(event) });
  const brush = slider("Brush, in percent of the width", { min: 2, max: 50, step: 1, value: 15 });
  const boxes = element("input", { type: "text", placeholder: "10,10,40,40", autocomplete: "off", onchange: () => repaint() });
  const painted = element("input", {
    type: "hidden",
    name: "painted",
    value: "[]",
    onchange: () => {
      strokes = listOf(painted.value).filter((one) => one?.points?.length);
    },
  }); // the strokes, to be kept
  const strength = slider("Strength", { min: 0.05, max: 1, step: 0.05, value: STRENGTH });
  const more = element(
    "div",
    { class: "fields", hidden: true },
    element("p", { class: "empty" }, "Paint over the picture in the answer card."),
    brush,
    field("Boxes to inpaint", boxes, "left,top,right,bottom in pixels, several separated by spaces."),
    element(
      "div",
      { class: "row" },
      element("button", { type: "button", onclick: clear }, "Clear the mask"),
      element("button", { type: "button", onclick: () => give(input, []) }, "Without an image"),
    ),
    strength,
    painted,
  );

  async function take({ detail }) {
    more.hidden = true;
    if (detail?.isKept) wasMasked = isMasked(); // the strength was kept too
    else clear();
    try {
      if (!(await picture.take(input.files[0]))) return;
    } catch (error) {
      say(error);
      return;
    }
    more.hidden = false;
    repaint();
  }

  function isMasked() {
    return strokes.length > 0 || boxes.value.trim() !== "";
  }

  function clear() {
    strokes = [];
    boxes.value = "";
    repaint();
    enter(painted, "[]"); // keeps the form as it is now
  }

  function line(context, { width, points }, colour) {
    context.lineCap = "round";
    context.lineJoin = "round";
    context.lineWidth = width;
    context.strokeStyle = colour;
    context.beginPath();
    const [[x, y]] = points;
    context.moveTo(x - 0.01, y); // a line without a length is not drawn: so a touch makes a dot
    for (const point of points) context.lineTo(...point);
    context.stroke();
  }

  function paint(context, colour) {
    for (const stroke of strokes) line(context, stroke, colour);
    context.fillStyle = colour;
    for (const [left, top, right, bottom] of places(boxes.value, 4)) context.fillRect(left, top, right - left, bottom - top);
  }

  /** Repaints everything; the first paint, and removing the last, also sets the strength. */
  function repaint() {
    picture.clear();
    if (isMasked() !== wasMasked) strength.input.set(isMasked() ? STRENGTH_OF_MASK : STRENGTH);
    wasMasked = isMasked();
    try {
      paint(picture.canvas.getContext("2d"), PAINT);
    } catch (error) {
      say(error);
    }
  }

  picture.node.addEventListener("pointerdown", (event) => {
    if (!event.isPrimary || event.button) return;
    picture.node.setPointerCapture(event.pointerId);
    strokes.push({ width: (brush.input.value / 100) * picture.canvas.width, points: [picture.at(event)] });
    if (strokes.length === 1) repaint();
    else line(picture.canvas.getContext("2d"), strokes.at(-1), PAINT);
  });
  picture.node.addEventListener("pointermove", (event) => {
    if (!picture.node.hasPointerCapture(event.pointerId)) return;
    const { width, points } = strokes.at(-1);
    points.push(picture.at(event));
    line(picture.canvas.getContext("2d"), { width, points: points.slice(-2) }, PAINT);
  });

  picture.node.addEventListener("pointerup", () => enter(painted, JSON.stringify(strokes)));

  /** Returns the inpainting mask as a PNG: white is generated anew. */
  function mask() {
    const { width, height } = picture.canvas;
    const canvas = element("canvas", { width, height });
    const context = canvas.getContext("2d");
    context.fillRect(0, 0, width, height);
    paint(context, "white");
    return new Promise((done) => {
      canvas.toBlob(done);
    });
  }

  return {
    stage: picture.node,
    node: element(
      "details",
      {},
      element("summary", {}, "Edit an image"),
      field("Picture", input, "JPEG, PNG, WebP, BMP or GIF. Paint the parts to generate anew; without paint, all of it is."),
      more,
    ),
    async request() {
      if (!picture.file) return { edit: {}, parameters: {} };
      const edit = { image: await base64(picture.file) };
      if (isMasked()) edit.mask = await base64(await mask());
      return { edit, parameters: { strength: Number(strength.input.value) } };
    },
    close: picture.close,
  };
}

export const draw = {
  id: "draw",
  title: "Draw",
  lead: "An image from noise, step by step; or your own image, edited where you paint.",
  capabilities: ["generate_image"],
  open(place, served) {
    let urls = []; // of the answer's images
    const words = { prompt: null, negativePrompt: null };
    const prompts = element("div", { class: "fields" });
    const offer = () => {
      const { labels = [], maxInputTokenCount } = chosen(model, served);
      for (const name of Object.keys(words)) {
        words[name] = labels.length ? choice([["", "Unconditional"], ...labels.map((label) => [label, label])]) : textArea("", 2);
      }
      const most = maxInputTokenCount ? `At most ${maxInputTokenCount} tokens; empty` : "Empty";
      const hint = labels.length ? undefined : `${most}: unconditional`;
      show(prompts, field("Prompt", words.prompt, hint), field("Negative prompt", words.negativePrompt, "For guidance away from it"));
    };
    const model = modelChoice(served, offer);
    offer();
    const count = number({ min: 1, max: 16, step: 1, value: 1 });
    const steps = number({ min: 1, max: 250, step: 1, placeholder: "the model's" });
    const guidance = number({ min: 0, max: 30, step: 0.1, placeholder: "the model's" });
    const seed = number({ min: 0, step: 1 });
    const sampler = choice(SAMPLERS);
    const over = ground((error) => show(form.output, problem(error)));

    function forget() {
      urls.forEach((url) => URL.revokeObjectURL(url));
      urls = [];
    }

    function gallery({ model: name, prompt = "a picture" }, results) {
      forget();
      urls = results.map(({ png }) => URL.createObjectURL(new Blob([fromBase64(png)], { type: "image/png" })));
      return element(
        "ul",
        { class: results.length > 1 ? "gallery" : "gallery single" },
        ...results.map(({ seed: own = "0", width, height }, index) =>
          element(
            "li",
            {},
            pictureOf({ src: urls[index], alt: `${prompt}, drawn with seed ${own}` }),
            element("small", {}, `seed ${own} · ${width} x ${height} pixels`),
            element("a", { href: urls[index], download: `${name}-${own}.png` }, "Download PNG"),
          ),
        ),
      );
    }

    const form = caller({
      isLive: true,
      fields: [
        modelField(model),
        prompts,
        element(
          "div",
          { class: "grid" },
          field("Images", count, "A single one shows its steps"),
          field("Seed", seed, "Empty: random"),
          field("Steps", steps),
          field("Guidance", guidance, "1: none, half the work"),
        ),
        field("Sampler", sampler),
        over.node,
      ],
      label: "Draw",
      stage: over.stage,
      example() {
        const { labels = [] } = chosen(model, served);
        if (!words.prompt.value) enter(words.prompt, labels.at(-1) ?? "a blue square");
      },
      async prepare() {
        const { edit, parameters } = await over.request();
        const whole = {
          ...addressed(model, served),
          prompt: words.prompt.value.trim() || undefined,
          negativePrompt: words.negativePrompt.value.trim() || undefined,
          parameters: {
            stepCount: steps.given(),
            guidanceScale: guidance.given(),
            sampler: sampler.value,
            seed: seed.value || undefined,
            ...parameters,
          },
          ...edit,
        };
        const service = "ImageGenerationService";
        if (count.given() > 1) return { service, method: "GenerateImage", request: { ...whole, imageCount: count.given() } };
        const previewStepCount = Math.ceil((steps.given() ?? DEFAULT_STEPS) / NUM_PREVIEWS);
        return { service, method: "StreamGenerateImage", request: { ...whole, previewStepCount }, whole };
      },
      async run(prepared, signal, output) {
        const { service, method, request } = prepared;
        if (!prepared.whole) {
          show(output);
          const answer = await call(service, method, request, { signal });
          show(output, gallery(request, answer.results), timings(answer));
          return;
        }
        const preview = pictureOf({ alt: "The image as predicted at this step", hidden: true });
        const bar = element("progress", { "aria-label": "Steps", value: 0 });
        const note = element("p", { class: "timings" }, "waiting for the first step …");
        show(output, element("ul", { class: "gallery single" }, element("li", {}, preview, bar)), note);
        try {
          for await (const message of stream(service, method, request, { signal })) {
            const { completedStepCount = 0, stepCount, previewPng, result } = message;
            bar.max = stepCount;
            bar.value = completedStepCount;
            note.textContent = `step ${completedStepCount} of ${stepCount}`;
            if (previewPng) preview.src = `data:image/png;base64,${previewPng}`;
            preview.hidden = !preview.src;
            if (result) show(output, gallery(request, [result]), timings(message));
          }
        } catch (error) {
          note.textContent = error.name === "AbortError" ? `${note.textContent}; stopped` : "";
          bar.remove();
          throw error;
        }
      },
    });
    place.append(form.node);
    return {
      leave: form.stop,
      close() {
        forget();
        over.close();
        form.stop();
      },
    };
  },
};
