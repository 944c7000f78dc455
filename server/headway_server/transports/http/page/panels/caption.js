import { call, CallError } from "../api.js";
import { addressed, caller, choice, chosen, field, language, modelChoice, modelField, number, timings } from "../controls.js";
import { characters, element, show } from "../dom.js";
import { ship } from "../examples.js";
import { base64, give, picture } from "../images.js";

/** Joins a caption's tokens to words: [[word, its mean attention over the patches]]. */
function words(text, tokens) {
  const all = characters(text);
  const found = [];
  for (const { span = {}, patchAttention = [] } of tokens) {
    const { start = 0, end = 0 } = span;
    if (start === end) continue;
    const last = found.at(-1);
    if (last && last.end === start) {
      last.end = end;
      last.rows.push(patchAttention);
    } else found.push({ start, end, rows: [patchAttention] });
  }
  return found.map(({ start, end, rows }) => [
    all.slice(start, end).join(""),
    rows[0].map((_, place) => rows.reduce((sum, row) => sum + row[place], 0) / rows.length),
  ]);
}

/** The image with a layer over its seen part; `look(weights)` shows the attention of a word. */
function overlay(url, name, result) {
  const canvas = element("canvas", { width: result.patchColumnCount, height: result.patchRowCount, "aria-hidden": "true" });
  const { left = 0, top = 0, right = result.width, bottom = result.height } = result.seenPart ?? {};
  const share = (length, whole) => `${(100 * length) / whole}%`;
  canvas.style.inset = `${share(top, result.height)} auto auto ${share(left, result.width)}`;
  canvas.style.inlineSize = share(right - left, result.width);
  canvas.style.blockSize = share(bottom - top, result.height);
  const node = element("div", { class: "overlay" }, picture({ src: url, alt: name }), canvas);
  const look = (weights) => {
    const context = canvas.getContext("2d");
    const pixels = context.createImageData(canvas.width, canvas.height);
    const [red, green, blue] = getComputedStyle(document.documentElement).getPropertyValue("--heat-rgb").split(" ").map(Number);
    const most = Math.max(...weights) || 1;
    weights.forEach((weight, place) => pixels.data.set([red, green, blue, Math.round((200 * weight) / most)], place * 4));
    context.putImageData(pixels, 0, 0);
  };
  return { node, look };
}

export const caption = {
  id: "caption",
  title: "Caption",
  lead: "A caption of an image, and the model's attention at each word.",
  capabilities: ["caption_image"],
  open(place, served) {
    let url = null; // of the picture
    const to = choice([]);
    const offer = () => {
      const codes = chosen(model, served).targetLanguages ?? [];
      show(to, ...codes.map((code) => element("option", { value: code }, language(code))));
      to.value = codes.find((code) => code === navigator.language.slice(0, 2)) ?? codes[0] ?? "";
      to.disabled = codes.length < 2;
    };
    const model = modelChoice(served, offer);
    offer();
    const input = element("input", { type: "file", accept: "image/*", onchange: (event) => take(event) });

    function take({ detail }) {
      if (url) URL.revokeObjectURL(url);
      url = input.files.length ? URL.createObjectURL(input.files[0]) : null;
      if (url) show(form.output, element("div", { class: "overlay" }, picture({ src: url, alt: input.files[0].name })));
      if (url && !detail?.isKept) form.submit();
    }

    const prefix = element("input", { type: "text", autocomplete: "off" });
    const question = element("input", { type: "text", autocomplete: "off" });
    const beams = number({ min: 1, max: 8, step: 1, value: 4 });
    const hypotheses = number({ min: 1, max: 8, step: 1, value: 3 });
    const form = caller({
      fields: [
        modelField(model),
        field("Picture", input, "JPEG, PNG, WebP, BMP or GIF"),
        field("Language", to),
        field("Begins with", prefix, "Whole words; optional"),
        field("Question", question, "Of models that are asked, such as <OD>; optional"),
        element("div", { class: "grid" }, field("Beams", beams, "1 is greedy"), field("Captions", hypotheses, "The best n")),
      ],
      label: "Caption",
      async example() {
        give(input, [await ship()]);
        return true;
      },
      async prepare() {
        if (!input.files.length) throw new CallError("invalid_argument", "Choose an image first.");
        const request = {
          ...addressed(model, served),
          images: [await base64(input.files[0])],
          parameters: { beamSize: beams.given(), hypothesisCount: hypotheses.given() },
          includeAttention: true,
        };
        if (to.value) request.language = to.value;
        if (prefix.value.trim()) request.prefixes = [prefix.value];
        if (question.value.trim()) request.questions = [question.value];
        return { service: "CaptionService", method: "CaptionImage", request };
      },
      async run(prepared, signal, output) {
        const file = input.files[0];
        const answer = await call(prepared.service, prepared.method, prepared.request, { signal });
        const [result] = answer.results;
        const { node, look } = overlay(url, file.name, result);
        const all = result.hypotheses?.length ? result.hypotheses : [result];
        const line = element("p", { class: "words", lang: prepared.request.language });
        const pick = (hypothesis) => {
          const spoken = words(hypothesis.text ?? "", hypothesis.tokens ?? []);
          const buttons = spoken.map(([word, weights]) =>
            element("button", { type: "button", class: "link", onclick: () => look(weights), onfocus: () => look(weights), onmouseenter: () => look(weights) }, word),
          );
          show(line, ...buttons.flatMap((button) => [button, " "]));
          if (spoken.length) look(spoken[0][1]);
        };
        const list = element(
          "ol",
          { class: "hypotheses" },
          ...all.map((hypothesis) =>
            element(
              "li",
              {},
              element("button", { type: "button", class: "link", onclick: () => pick(hypothesis), lang: prepared.request.language }, hypothesis.text ?? ""),
              " ",
              element("small", {}, `score ${(hypothesis.score ?? 0).toFixed(2)}`),
            ),
          ),
        );
        show(output, node, list, element("small", {}, "Point at a word to see the model's attention over the image."), line, timings(answer));
        pick(all[0]);
      },
    });
    place.append(form.node);
    return {
      leave: form.stop,
      close() {
        if (url) URL.revokeObjectURL(url);
        form.stop();
      },
    };
  },
};
