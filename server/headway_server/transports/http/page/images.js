// Images of the API, and one with a pointer.

import { CallError } from "./api.js";
import { drawn, element, show } from "./dom.js";

/** Returns the bytes of a file in base64, for JSON. */
export async function base64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let start = 0; start < bytes.length; start += 32768) text += String.fromCharCode(...bytes.subarray(start, start + 32768));
  return btoa(text);
}

/** Returns the bytes of base64 in JSON. */
export function fromBase64(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

/** Parses points, "120,80 200,90", as numbers; throws for anything else. */
export function places(text, count) {
  return text.split(/[\s;]+/).filter(Boolean).map((part) => {
    const numbers = part.split(",").map(Number);
    if (numbers.length !== count || numbers.some((one) => !Number.isFinite(one))) {
      throw new CallError("invalid_argument", `“${part}” is not ${count} numbers separated by commas.`);
    }
    return numbers;
  });
}

const SMALL = 200; // pixels of a width below which a picture is scaled up without smoothing

/** Gives files to an input as if somebody had chosen them; with `isKept`, the panel shows them without a call. */
export function give(input, files, { isKept = false } = {}) {
  const transfer = new DataTransfer();
  for (const file of files) transfer.items.add(file);
  input.files = transfer.files;
  input.dispatchEvent(new CustomEvent("change", { bubbles: true, detail: { isKept } }));
}

/** Shows a picture at a size that one can see: a small one in whole pixels. */
export function picture(attributes) {
  const image = element("img", {
    draggable: "false",
    ...attributes,
    onload: () => {
      image.classList.toggle("pixelated", image.naturalWidth < SMALL);
      image.parentElement?.style.setProperty("--ratio", image.naturalWidth / image.naturalHeight);
    },
  });
  return image;
}

/** A picture below a canvas of its own size and marks in its pixels; hidden until there is one. */
export function pointed() {
  const canvas = element("canvas", { "aria-hidden": "true" });
  const marks = drawn("svg", { class: "marks", "aria-hidden": "true" });
  const image = picture({ alt: "" });
  const node = element("div", { class: "overlay pointed", hidden: true }, image, canvas, marks);
  return {
    file: null, // the latest, if it is a picture
    node,
    canvas,
    image,
    marks,
    /** Pixels of the picture to a pixel of the screen. */
    scale: () => canvas.width / (image.clientWidth || canvas.width),
    /** Shows a file below an empty canvas; none hides the picture. Returns true if it is shown and still the latest. */
    async take(file = null) {
      URL.revokeObjectURL(image.src);
      node.hidden = true;
      image.removeAttribute("src");
      this.file = file;
      if (!file) return false;
      const url = URL.createObjectURL(file);
      image.src = url;
      image.alt = file.name;
      const isImage = await image.decode().then(() => true, () => false);
      if (image.src !== url) return false; // another was taken meanwhile
      if (!isImage) {
        this.file = null;
        throw new CallError("invalid_argument", "The browser cannot read this as an image.");
      }
      node.hidden = false;
      this.clear();
      return true;
    },
    clear() {
      canvas.width = image.naturalWidth;
      canvas.height = image.naturalHeight;
      marks.setAttribute("viewBox", `0 0 ${canvas.width} ${canvas.height}`);
      show(marks);
    },
    /** Returns where a pointer is, in pixels of the picture. */
    at(event) {
      const shown = image.getBoundingClientRect();
      const within = (value, size, most) => Math.round(Math.min(Math.max(value / size, 0), 1) * most);
      return [
        within(event.clientX - shown.left, shown.width, image.naturalWidth),
        within(event.clientY - shown.top, shown.height, image.naturalHeight),
      ];
    },
    close: () => URL.revokeObjectURL(image.src),
  };
}
